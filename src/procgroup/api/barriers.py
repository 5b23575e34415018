"""Barriers that name the missing ranks, and ``with rank_first():``, in which one rank prepares something first."""

from __future__ import annotations

import math
from types import TracebackType

from procgroup.api.default_group import Group, choose
from procgroup.api.ranks import group_rank_of
from procgroup.errors import CollectiveTimeout, PeerFailed
from procgroup.types import Timeout


def monitored_barrier(group: Group = None, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
    """Wait until every rank has called it; otherwise raise CollectiveTimeout, whose ``missing`` names the others.

    Every rank that waits raises it with all missing ranks, whichever rank's deadline passes first, so
    ``wait_all_ranks`` changes nothing. A rank that is late raises an error in its next call at the latest. Raises
    PeerLost at once when a rank's process ended. ``timeout`` is a timedelta or seconds; None: see procgroup.timeout.
    """
    chosen = choose(group, "monitored_barrier")
    if chosen is None:
        return
    try:
        chosen.barrier(False, timeout)
    except (CollectiveTimeout, PeerFailed) as error:
        if isinstance(error, PeerFailed) and error.cause != "timeout":
            raise
        raise CollectiveTimeout(
            missing=error.missing,
            seconds=error.seconds,
            op="monitored_barrier",
            sequence=error.sequence,
            group=error.group,
            rank=error.rank,
            size=error.size,
            members=error.members,
            calls=getattr(error, "calls", None),
        ) from None


class rank_first:  # noqa: N801 - used as a function
    """Run the block on one rank first; the other ranks of the group run it after that rank has left it.

    ``rank`` is a global rank, ``group_rank`` a rank of the group; by default it is the group's first rank. All ranks of
    the group enter. If the block raises on the first rank, the group ends, and the exception propagates. The other
    ranks wait without a deadline while the first rank runs the block. They raise: PeerFailed at once if the block
    raises; PeerLost if the first rank's process ends; CollectiveMismatch if the block makes a call of the same group.
    After the block, the first rank waits for the others for at most ``timeout``, a timedelta or seconds (None: see
    procgroup.timeout), and then raises CollectiveTimeout, which names the missing ranks. A rank that is not in the
    group is warned, and runs the block. Raises ValueError for a rank that is not in the group.
    """

    def __init__(
        self,
        rank: int | None = None,
        group: Group = None,
        group_rank: int | None = None,
        timeout: Timeout | None = None,
    ) -> None:
        self._group = choose(group, "rank_first")
        self._timeout = timeout
        self._first = 0
        if self._group is not None and (rank is not None or group_rank is not None):
            self._first = group_rank_of(self._group, rank, group_rank, ("rank", "group_rank"))

    def __enter__(self) -> None:
        if self._group is not None and self._group.rank() != self._first:
            self._group.rank_first(self._first, math.inf)

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._group is None or self._group.rank() != self._first:
            return
        if error is None:
            self._group.rank_first(self._first, self._timeout)
        else:
            self._group.fail_rank_first(error)
