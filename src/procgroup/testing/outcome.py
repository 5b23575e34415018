"""What ``run_ranks`` raises: the errors of all ranks together, or where each rank was at the deadline."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from types import FrameType

from procgroup.errors import GroupBroken, PeerFailed, PeerLost
from procgroup.failure_text import name_ranks

# What a rank raises because another one has failed before.
_CONSEQUENCES = (PeerLost, PeerFailed, GroupBroken)
# The files whose frames stand at the beginning of every rank's stack.
_STARTERS = (threading.__file__, str(Path(__file__).with_name("ranks.py")))


class RanksFailed(ExceptionGroup[Exception]):
    """Some ranks raised. ``errors`` maps each of them to its exception; causes come before consequences."""

    errors: dict[int, Exception]

    def __new__(cls, errors: Mapping[int, Exception], size: int) -> RanksFailed:
        ordered = dict(sorted(errors.items(), key=lambda entry: (isinstance(entry[1], _CONSEQUENCES), entry[0])))
        for rank, error in ordered.items():
            error.add_note(f"(raised on rank {rank} of {size})")
        first, error = next(iter(ordered.items()))
        headline = f"{name_ranks(sorted(ordered))} of {size} failed; rank {first}: {type(error).__name__}: {error}"
        failed = super().__new__(cls, headline, list(ordered.values()))
        failed.errors = ordered
        return failed

    def __init__(self, errors: Mapping[int, Exception], size: int) -> None:
        """Take the exceptions by rank, and how many ranks there were."""


class RanksTimeout(TimeoutError):
    """Some ranks were still running at the deadline. ``running`` lists them, ``errors`` is what other ranks raised."""

    def __init__(
        self, running: Sequence[int], size: int, seconds: float, stacks: str, errors: Mapping[int, BaseException]
    ) -> None:
        self.running: tuple[int, ...] = tuple(running)
        self.errors: dict[int, BaseException] = dict(errors)
        raised = "".join(f"\n--- rank {rank} raised {error!r}" for rank, error in sorted(errors.items()))
        super().__init__(f"{name_ranks(running)} of {size} still running after {seconds:g} s{raised}{stacks}")


def cause(errors: Mapping[int, BaseException]) -> BaseException | None:
    """Return an error that is to be raised as it is, such as Ctrl-C, SystemExit or pytest's skip; None without one."""
    return next((error for error in errors.values() if not isinstance(error, Exception)), None)


def stacks_of(threads: Mapping[int, Thread]) -> str:
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
