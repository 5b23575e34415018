"""What belongs to this process, and not to a group: its log, its end, its flight records and its stack signal.

All of it that changes is in ``state``: a reader finds it here, and a test that needs a fresh process knows what to
reset.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

TYPE_CHECKING = False  # importing typing and logging would delay the start of the launcher
if TYPE_CHECKING:
    import logging
    from pathlib import Path

    from procgroup.process.exit_reason import Origin
    from procgroup.process.process_end import Lost

_KEPT_TRANSLATED = 64


class _ExitWaits(threading.local):
    """The seconds that this thread's last waits took, one right after another, and when they ended."""

    seconds = 0.0
    ended = 0.0


class ProcessState:
    """The state of this process. A forked child has it too; the process numbers in it show whose it is."""

    def __init__(self) -> None:
        # The log: the global rank of this process, and the logger once something was logged.
        self.rank: int | None = None
        self.logger: logging.Logger | None = None

        # The end of the process: functions with their priorities, and the process that has registered them.
        self.end_functions: dict[Callable[[], None], int] = {}
        self.end_registered_in = 0
        self.is_ending = False
        self.waits: _ExitWaits = _ExitWaits()

        # Failures: of groups since the ranks came together, and the first lost rank among their causes.
        self.has_failed = False
        self.has_failed_to_start = False
        self.lost: Lost | None = None
        self.tell_late_ranks: Callable[[], None] | None = None

        # Exceptions: sys.last_value at first, of the process that forked this one, or of a prompt; the one that was
        # caught for a report; the last one that ended a thread, and when; and errors that another library raises as
        # errors of its own, by their texts.
        self.earlier_exception: BaseException | None = None
        self.noted_exception: BaseException | None = None
        self.thread_exception: tuple[BaseException, float] | None = None
        self.translated: deque[tuple[str, Origin]] = deque(maxlen=_KEPT_TRANSLATED)

        # Flight records: those made, the directory of this process's job (of its first group), and the process itself.
        self.records: list[Path] = []
        self.job_directory: Path | None = None
        self.recorded_process = 0

        # The process that has the handler of the stack signal; a forked child inherits both, and keeps them.
        self.stack_signal_process = 0


state: ProcessState = ProcessState()
