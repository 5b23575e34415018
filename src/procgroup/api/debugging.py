"""The debug level, and a breakpoint that stops one rank."""

from __future__ import annotations

import pdb
import sys
import traceback
from collections import Counter
from enum import IntEnum

from procgroup.api import default_group
from procgroup.api.collectives import barrier
from procgroup.process import environ
from procgroup.types import Timeout


class DebugLevel(IntEnum):
    """torch.distributed's levels. procgroup compares the ranks' calls at each of them, so they affect no result."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_level: list[DebugLevel] = []
_breakpoints: Counter[str] = Counter()


def get_debug_level() -> DebugLevel:
    """Return the level that was set, else the value of TORCH_DISTRIBUTED_DEBUG, else OFF."""
    if not _level:
        set_debug_level_from_env()
    return _level[-1]


def set_debug_level(level: DebugLevel) -> None:
    """Set the level of this process. Raises ValueError for an unknown level."""
    _level[:] = [DebugLevel(level)]


def set_debug_level_from_env() -> None:
    """Set the level from TORCH_DISTRIBUTED_DEBUG: OFF, INFO or DETAIL. Raises ValueError for another value."""
    _level[:] = [DebugLevel[environ.TORCH_DISTRIBUTED_DEBUG.get()]]


class _TerminalDebugger(pdb.Pdb):
    """A debugger that reads file descriptor 0, even where sys.stdin is another file, as in multiprocessing."""

    def interaction(self, *arguments: object) -> None:
        stdin = sys.stdin
        try:
            with open("/dev/stdin") as sys.stdin:  # noqa: PTH123
                super().interaction(*arguments)  # type: ignore[arg-type]
        finally:
            sys.stdin = stdin


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: Timeout | None = 3600) -> None:  # noqa: A001 - torch's name
    """Stop in the debugger on one global rank; the others wait in a barrier until it goes on.

    The first ``skip`` calls from one place do nothing. ``timeout_s`` becomes the default group's timeout, so that
    no rank times out while the debugger is used; None keeps the timeout. Raises ValueError before init_process_group.
    """
    if skip > 0:
        place = "".join(traceback.format_stack())
        _breakpoints[place] += 1
        if _breakpoints[place] <= skip:
            return
    group = default_group.current()
    if timeout_s is not None:
        group.set_timeout(timeout_s)
    if group.rank() == rank:
        debugger = _TerminalDebugger()
        debugger.message(f"\nType 'up' to get to the frame that called dist.breakpoint(rank={rank})\n")
        debugger.set_trace()
    barrier()
