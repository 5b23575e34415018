"""A barrier that tells every rank who did not come."""

from __future__ import annotations

from procgroup.api.membership import choose
from procgroup.errors import CollectiveTimeout, OperationError, PeerFailed
from procgroup.groups.group import ProcessGroup
from procgroup.types import Timeout


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: Timeout | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank has come here; otherwise raise CollectiveTimeout, whose ``missing`` names who did not.

    Every rank that waits raises it with all missing ranks, whichever rank's deadline passes first, so
    ``wait_all_ranks`` changes nothing. A rank that comes too late
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
        if error.cause != "timeout":
            raise
        raise _timed_out(error, error.missing, error.seconds) from None


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
