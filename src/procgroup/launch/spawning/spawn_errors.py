"""How a function that ran in a spawned process failed: the record that the child leaves, and what the parent raises.

A child that raises sends one record before it ends: when (on the host's monotonic clock), whether it blames
another process, and the formatted traceback. It is text, so an exception that cannot be pickled is reported as
well as any other, and nothing is executed to read it. It goes through a pipe, which leaves nothing behind when
everything is killed, and it is shorter than a pipe's buffer, so that sending never waits for the parent.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection

from procgroup.errors import GroupBroken, PeerFailed, PeerLost, StoreLost

MAX_TRACEBACK = 8 * 1024
"""Characters of a traceback that are kept: at most 6 bytes each in the record, and a pipe takes 64 KiB."""

# Exceptions by which a rank says that another one, or the store, went first.
_SECONDARY = (PeerLost, PeerFailed, GroupBroken, StoreLost)


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

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg, error_index, error_pid)


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


@dataclass(frozen=True)
class Record:
    """What a child says about its failure. ``time`` is in seconds of ``time.monotonic``."""

    time: float
    secondary: bool
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Record:
        """Describe an exception that is being handled now."""
        # The first frame is the launcher's own.
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        return cls(time=time.monotonic(), secondary=isinstance(error, _SECONDARY), traceback=text)

    def send(self, connection: Connection) -> None:
        """Send the record to the parent; of a very long traceback, the beginning and the end."""
        text = self.traceback
        if len(text) > MAX_TRACEBACK:
            half = MAX_TRACEBACK // 2
            text = f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
        record = json.dumps(asdict(replace(self, traceback=text)), ensure_ascii=False)
        connection.send_bytes(record.encode(errors="backslashreplace"))

    @classmethod
    def receive(cls, connection: Connection) -> Record | None:
        """Return the record that has come by now, or None where the child sent none."""
        try:
            return cls(**json.loads(connection.recv_bytes())) if connection.poll() else None
        except (EOFError, OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class SpawnFailure:
    """One process that failed: by an exception (``record``) or by its ``exit_code``; ``time`` orders the failures."""

    index: int
    pid: int
    exit_code: int | None
    time: float
    record: Record | None

    @property
    def secondary(self) -> bool:
        return self.record is not None and self.record.secondary

    def exception(self) -> ProcessException:
        """Build what the parent raises; texts and attributes are those of torch.multiprocessing."""
        if self.record is not None:
            text = f"\n\n-- Process {self.index} terminated with the following error:\n{self.record.traceback}"
            return ProcessRaisedException(text, self.index, self.pid)
        code = self.exit_code or 0
        if code < 0:
            name = _signal_name(-code)
            text = f"process {self.index} terminated with signal {name}"
            return ProcessExitedException(text, self.index, self.pid, code, name)
        text = f"process {self.index} terminated with exit code {code}"
        return ProcessExitedException(text, self.index, self.pid, code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"<Unknown signal {number}>"
