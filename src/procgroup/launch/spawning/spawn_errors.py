"""The exceptions of ``spawn`` and ``elastic_launch`` for a function that failed in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from procgroup.launch.failures.failure import Failure


class ProcessException(Exception):
    """A spawned process failed. ``error_index`` is its number among the processes, ``error_pid`` its pid."""

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = error_pid

    def __reduce__(self) -> tuple[type[ProcessException], tuple[object, ...]]:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """The function raised; the text holds the child's traceback."""


class ProcessExitedException(ProcessException):
    """The process ended without an exception: ``exit_code`` is negative for a signal, then ``signal_name`` names it."""

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[type[ProcessException], tuple[object, ...]]:
        return type(self), (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)


def process_exception(failure: Failure, process: str, ending: str) -> ProcessException:
    """Return the exception of the parent for a failure; ``ending`` is its text where the function did not raise.

    ``process`` names the process in the text that holds its traceback.
    """
    if failure.exception:
        text = f"\n\n-- {process} terminated with the following error:\n{failure.evidence}"
        return ProcessRaisedException(text, failure.rank, failure.pid)
    return ProcessExitedException(ending, failure.rank, failure.pid, failure.exit_code, failure.signal_name)
