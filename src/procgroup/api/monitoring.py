"""A barrier that tells every rank who did not come."""

from __future__ import annotations

import re

from procgroup.api.membership import choose
from procgroup.errors import CollectiveTimeout, OperationError, PeerFailed
from procgroup.groups.group import ProcessGroup
from procgroup.types import Timeout

# What a rank whose deadline passes tells the others, see native/engine/failure.cpp.
_TIMED_OUT = re.compile(
    r"time limit of (\S+) s passed while it waited for rank ([\d, -]+)(?: and \d+ more)?(?: of the group)?$"
)


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: Timeout | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank has come here; otherwise raise CollectiveTimeout, whose ``missing`` names who did not.

    Every rank that waits is told of all missing ranks (of the first thirty, where many ranks far from each other are
    missing), whichever rank's deadline passes first, so ``wait_all_ranks`` changes nothing. A rank that comes too late
    learns of it in its next call at the latest. Raises PeerLost at once when a rank's process ended. ``timeout`` is a
    timedelta or seconds; None means the group's own.
    """
    chosen = choose(group, "monitored_barrier")
    if chosen is None:
        return
    try:
        chosen.barrier(False, chosen.timeout if timeout is None else timeout)
    except CollectiveTimeout as error:
        raise _timed_out(error, error.missing, error.seconds) from None
    except PeerFailed as error:
        found = _TIMED_OUT.search(error.reason)
        if found is None:
            raise
        raise _timed_out(error, _ranks(found[2], error.size), float(found[1])) from None


def _timed_out(error: OperationError, missing: tuple[int, ...], seconds: float) -> CollectiveTimeout:
    return CollectiveTimeout(
        missing=missing,
        seconds=seconds,
        op="monitored_barrier",
        sequence=error.sequence,
        group=error.group,
        rank=error.rank,
        size=error.size,
        members=error.members,
        calls=getattr(error, "calls", None),
    )


def _ranks(text: str, size: int) -> tuple[int, ...]:
    """Read "1, 2, 5-9"."""
    ranks: list[int] = []
    for entry in text.split(", "):
        first, _, last = entry.partition("-")
        ranks.extend(range(int(first), min(int(last or first) + 1, size)))
    return tuple(ranks)
