"""How much is checked and said, and a breakpoint for one rank of many."""

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
    """torch.distributed's levels. procgroup compares the ranks' calls at every level, so that none changes a result."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_level: list[DebugLevel] = []
_breakpoints: Counter[str] = Counter()


def get_debug_level() -> DebugLevel:
    """Return the level that was set, or that TORCH_DISTRIBUTED_DEBUG says; OFF when neither did."""
    if not _level:
        set_debug_level_from_env()
    return _level[-1]


def set_debug_level(level: DebugLevel) -> None:
    """Set the level of this process. Raises ValueError for what is none."""
    _level[:] = [DebugLevel(level)]


def set_debug_level_from_env() -> None:
    """Set the level that TORCH_DISTRIBUTED_DEBUG says: OFF, INFO or DETAIL. Raises ValueError for another."""
    _level[:] = [DebugLevel[environ.TORCH_DISTRIBUTED_DEBUG.get()]]


class _TerminalDebugger(pdb.Pdb):
    """A debugger that reads the terminal, even in a process whose standard input is something else."""

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
