"""Which error ``run_ranks`` raises as it is, and the stacks of its ranks at the deadline."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from types import FrameType

# The files whose frames stand at the beginning of every rank's stack.
_STARTERS = (threading.__file__, str(Path(__file__).with_name("ranks.py")))


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
