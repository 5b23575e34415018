"""Call a function on every rank of a world of threads, under one deadline."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

from procgroup import types
from procgroup.api import default_group, exit_hooks
from procgroup.errors import RanksFailed, RanksTimeout
from procgroup.groups.group import ProcessGroup
from procgroup.testing.world import admit_this_thread, leave_at_once, make_groups
from procgroup.types import Timeout

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

# How long ranks may take to end after they were stopped.
_END_SECONDS = 5.0
# The files whose frames stand at the beginning of every rank's stack.
_STARTERS = (threading.__file__, __file__)


class _Stopped(SystemExit):
    """Raised inside of a rank's Python code when the world has to end. A thread may end with it in silence."""


class _ThreadRank(threading.Thread):
    """One rank: a thread with a default group of its own."""

    def __init__(self, group: ProcessGroup, call: Callable[[], Any], ended: threading.Semaphore) -> None:
        super().__init__(name=f"rank {group.rank()}", daemon=True)
        self.group = group
        self.value: Any = None
        self.error: BaseException | None = None
        self.has_ended = False
        self._call = call
        self._ended = ended

    def run(self) -> None:
        default_group.use_own_slot()
        slot = default_group.slot()
        slot.group, slot.was_used = self.group, True
        try:
            admit_this_thread(self.group)
            self.value = self._call()
            exit_hooks.leave(self.group)
        except BaseException as error:
            self.error = error
            try:
                leave_at_once(self.group, error)
            except _Stopped:  # stop() came while this rank was leaving already
                leave_at_once(self.group, error)
        finally:
            self.has_ended = True
            self._ended.release()

    def stop(self) -> None:
        """End this rank's calls, and raise in its Python code."""
        self.group.abort()
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(_Stopped))


def run_ranks(
    function: Callable[[*Arguments], T],
    size: int,
    *arguments: *Arguments,
    timeout: Timeout = 30.0,
    transport: str | None = None,
    hosts: Sequence[int] | None = None,
    backend: str | None = None,
) -> list[T]:
    """Call ``function(*arguments)`` on ``size`` ranks, which are threads of this process; return what each returned.

    Each rank has a default group of its own: ``get_rank()`` tells them apart, every operation moves real data,
    and the function neither calls init_process_group nor needs to destroy anything. ``timeout`` (a timedelta or
    seconds) is for all of it. ``transport`` is "shm", "tcp" or "auto", by default what PROCGROUP_TRANSPORT says.
    ``hosts`` has a number for each rank: ranks with different numbers share no memory, as if on different hosts.
    ``backend`` is that of init_process_group.

    Raises RanksFailed with the errors of all ranks; RanksTimeout, which says where each rank was, at the
    deadline. KeyboardInterrupt, SystemExit and pytest's skip of any rank are raised as they are.
    """
    seconds = types.seconds(timeout)
    ended = threading.Semaphore(0)
    # The deadline of a call must not come before that of the world, which says more.
    groups = make_groups(size, types.seconds(types.DEFAULT_TIMEOUT), transport, hosts, backend)
    admit_this_thread(groups[0])
    ranks = [_ThreadRank(group, lambda: function(*arguments), ended) for group in groups]
    for rank in ranks:
        rank.start()
    try:
        _await(ranks, ended, seconds)
    except BaseException:
        _stop(ranks)
        raise
    errors = _errors(ranks)
    if not errors:
        return [thread.value for thread in ranks]
    for error in errors.values():
        if not isinstance(error, Exception):  # such as Ctrl-C, SystemExit or pytest's skip
            raise error
    raise RanksFailed({rank: error for rank, error in errors.items() if isinstance(error, Exception)}, size)


def _await(ranks: list[_ThreadRank], ended: threading.Semaphore, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for _ in ranks:
        if not ended.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            running = {rank: thread for rank, thread in enumerate(ranks) if not thread.has_ended}
            raise RanksTimeout(list(running), len(ranks), seconds, stacks_of(running), _errors(ranks))
    for thread in ranks:
        thread.join()


def _errors(ranks: list[_ThreadRank]) -> dict[int, BaseException]:
    return {rank: thread.error for rank, thread in enumerate(ranks) if thread.error is not None}


def _stop(ranks: list[_ThreadRank]) -> None:
    """Make every rank end; one that sleeps in foreign code is left behind as a daemon."""
    deadline = time.monotonic() + _END_SECONDS
    for thread in ranks:
        if thread.is_alive():
            thread.stop()
    for thread in ranks:
        thread.join(max(deadline - time.monotonic(), 0.0))


def stacks_of(threads: Mapping[int, threading.Thread]) -> str:
    """Return where each thread is now, by rank."""
    frames = sys._current_frames()
    return "".join(
        f"\n--- rank {rank} is in\n{_stack(frames[thread.ident])}"
        for rank, thread in threads.items()
        if thread.ident in frames
    )


def _stack(frame: FrameType) -> str:
    """Return a thread's stack, without what started it."""
    stack = itertools.dropwhile(lambda entry: entry.filename in _STARTERS, traceback.extract_stack(frame))
    return "".join(traceback.format_list(list(stack))) or "its start\n"
