"""What is to be done when this process ends, also where multiprocessing has started it; how long it may wait then.

Before Python 3.13 a process that multiprocessing forks runs no atexit functions, and since then only those that it has
registered itself. It runs multiprocessing's own finalizers always.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from procgroup.process import log, state

SILENT_SECONDS = 2.0
"""How long a wait for other ranks at the end may last before it says for whom."""

FAILED_SECONDS = 2.0
"""How long such waits last at most, all together, when a group has failed on this process."""

LATE_SECONDS = 1.0
"""How long a process that hosts the store of a start which has failed stays for ranks that have not come yet."""

# An exception that ended a thread so long before the process's end is what the process ends with.
_THREAD_SECONDS = 10.0
_PAUSE_SECONDS = 1.0


class Lost(NamedTuple):
    """A rank by whose end a group of this process broke: its global rank, process, host if that is another, and how."""

    rank: int
    pid: int
    host: str
    text: str


def at_process_end(function: Callable[[], None], priority: int) -> None:
    """Call ``function`` once when this process ends in order, those of a higher priority first."""
    state.end_functions[function] = priority
    if state.end_registered_in == os.getpid():  # a forked child has not always the registration
        return
    state.end_registered_in = os.getpid()
    state.earlier_exception = getattr(sys, "last_value", None)
    atexit.unregister(_run)
    atexit.register(_run)
    # A child of multiprocessing has imported it.
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _run, exitpriority=0)


def note_failure(*, starting: bool = False) -> None:
    """Keep in mind that a group failed on this process, so that its end need not wait long for the others.

    ``starting`` says that the others read why in the store, which this process may host.
    """
    state.has_failed = True
    state.has_failed_to_start = state.has_failed_to_start or starting


def note_lost(lost: Lost) -> None:
    """Keep in mind that the end of another rank broke a group of this process; the first one counts."""
    if state.lost is None:
        state.lost = lost


def forget_failure() -> None:
    """Forget it: the ranks have come together again."""
    state.has_failed = state.has_failed_to_start = False
    state.tell_late_ranks = state.lost = None


def stay_for_late_ranks(tell: Callable[[], None]) -> None:
    """Keep in mind that ranks may yet come to the start that has failed; ``tell`` tells them, at this process's end."""
    state.tell_late_ranks = tell


def tell_late_ranks() -> bool:
    """Tell the ranks that come to the last start that it has failed; return whether there may be such ranks."""
    if state.tell_late_ranks is None:
        return False
    state.tell_late_ranks()
    return True


def wait_for_others(ended: Callable[[], bool], limit: float, awaited: Callable[[], str], pause: float = 0.0) -> bool:
    """Wait until ``ended()``, for at most ``limit`` seconds, or 2 s once a group has failed on this process.

    Then, and when the process ends, waits that follow one another within a second share that time, with those before
    them that were in vain: nobody waits twice for a host that is cut off. Returns whether it has ended. After 2 s a
    warning shows what is waited for, which ``awaited()`` returns. ``pause`` is slept between two looks.
    """
    started = time.monotonic()
    waits = state.waits
    spent = waits.seconds if started - waits.ended < _PAUSE_SECONDS else 0.0
    is_shared = state.is_ending or state.has_failed
    if is_shared:
        limit = (min(limit, FAILED_SECONDS) if state.has_failed else limit) - spent
    is_silent = limit > FAILED_SECONDS
    while not (is_done := ended()):
        waited = time.monotonic() - started
        if waited >= limit:
            break
        if is_silent and waited >= SILENT_SECONDS:
            is_silent = False
            log.warning(f"{awaited()}, for at most {limit - waited:.0f} s more")
        time.sleep(pause)
    waits.ended = time.monotonic()
    # One that ended well says nothing of the next: a program may destroy one group after another.
    waits.seconds = spent + waits.ended - started if is_shared or not is_done else 0.0
    return is_done


def note_exception(error: BaseException) -> None:
    """Say that this process is about to end with an exception, where it was caught for a report of its own."""
    state.noted_exception = error


def note_thread_exception(error: BaseException) -> None:
    """Say that an exception has ended a thread, which is not the main one."""
    state.thread_exception = (error, time.monotonic())


def ending_exception() -> BaseException | None:
    """Return the exception that ends this process, as far as can be known.

    sys.exit is none, whatever its status, because Python does not show the status at the end of a program; in a process
    of multiprocessing, sys.exit with an error's status while an exception is handled stands for that.
    """
    raised = sys.exc_info()[1] if state.noted_exception is None else state.noted_exception
    if raised is None and not hasattr(sys, "ps1"):
        last = getattr(sys, "last_value", None)
        raised = None if last is state.earlier_exception else last
    if isinstance(raised, SystemExit):
        raised = raised.__context__ if raised.code not in (0, None) else None
    return None if isinstance(raised, SystemExit) else raised


def thread_exception() -> BaseException | None:
    """Return the exception that has ended a thread just now: a program's main part may have run there."""
    if state.thread_exception is None or time.monotonic() - state.thread_exception[1] > _THREAD_SECONDS:
        return None
    return state.thread_exception[0]


def _run() -> None:
    state.is_ending = True
    with ExitStack() as stack:  # all of them, also when one raises
        for function, _ in sorted(state.end_functions.items(), key=lambda item: item[1]):
            stack.callback(_call, function)
        state.end_functions.clear()


def _call(function: Callable[[], None]) -> None:
    try:
        function()
    except KeyboardInterrupt as interrupt:
        note_exception(interrupt)  # the functions that follow wait for no other rank
        raise
