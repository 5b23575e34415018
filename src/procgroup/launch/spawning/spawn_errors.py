"""Build the exceptions of ``spawn`` and ``elastic_launch`` for a function that failed in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from procgroup.errors import ProcessException, ProcessExitedException, ProcessRaisedException

if TYPE_CHECKING:
    from procgroup.launch.failures.failure import Failure


def process_exception(failure: Failure, process: str, ending: str) -> ProcessException:
    """Return the exception of the parent for a failure; ``ending`` is its text where the function did not raise.

    ``process`` names the process in the text that holds its traceback.
    """
    if failure.exception:
        text = f"\n\n-- {process} terminated with the following error:\n{failure.evidence}"
        return ProcessRaisedException(text, failure.rank, failure.pid)
    return ProcessExitedException(ending, failure.rank, failure.pid, failure.exit_code, failure.signal_name)
