"""A barrier that tells every rank who did not come."""

from __future__ import annotations

import contextlib
import json
import re

from procgroup.api.membership import choose
from procgroup.errors import CollectiveTimeout, DistError, OperationError, PeerFailed
from procgroup.groups.group import ProcessGroup
from procgroup.types import Timeout

# What a rank says when it gives up at its deadline. Where memory is shared it names whom it waited for.
_GAVE_UP = re.compile(r"time limit of (\S+) s passed while it waited for rank ([\d, ]+)$")
_TIMED_OUT = re.compile(r"timed out|time limit")
# Where a group keeps the list of who is missing. There is one at most: the group is broken then.
_KEY = "monitored_barrier"
# How long the list of who is missing may take from one rank to another through the store.
_LIST_SECONDS = 5.0


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: Timeout | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank has come here; otherwise raise CollectiveTimeout, whose ``missing`` names who did not.

    Every rank that waits is told of all missing ranks, whichever rank's deadline passes first, so ``wait_all_ranks``
    changes nothing. A rank that comes too late learns of it in its next call at the latest. Raises PeerLost at once
    when a rank's process ended. ``timeout`` is a timedelta or seconds; None means the group's own.
    """
    chosen = choose(group, "monitored_barrier")
    if chosen is None:
        return
    try:
        chosen.barrier(False, chosen.timeout if timeout is None else timeout)
    except CollectiveTimeout as error:
        _publish(chosen, error)
        raise _timed_out(error, error.missing, error.seconds) from None
    except PeerFailed as error:
        found = _find(chosen, error)
        if found is None:
            raise
        raise _timed_out(error, *found) from None


def _timed_out(error: OperationError, missing: tuple[int, ...], seconds: float) -> CollectiveTimeout:
    return CollectiveTimeout(
        missing=missing,
        seconds=seconds,
        op="monitored_barrier",
        sequence=error.sequence,
        group=error.group,
        rank=error.rank,
        size=error.size,
    )


def _publish(group: ProcessGroup, error: CollectiveTimeout) -> None:
    """Tell those that only hear that this rank gave up who is missing; without a store they hear no more than that."""
    with contextlib.suppress(DistError):
        group.store.set(_KEY, json.dumps([error.sequence, error.missing, error.seconds]))


def _find(group: ProcessGroup, error: PeerFailed) -> tuple[tuple[int, ...], float] | None:
    """Return (missing ranks, limit in seconds) of the rank that gave up first.

    None when it had another reason, or gave up in an earlier call.
    """
    if (found := _GAVE_UP.search(error.reason)) is not None:
        return tuple(int(rank) for rank in found[2].split(", ")), float(found[1])
    if _TIMED_OUT.search(error.reason) is None:
        return None
    with contextlib.suppress(DistError):
        sequence, missing, seconds = json.loads(group.store.get(_KEY, _LIST_SECONDS))
        return (tuple(missing), float(seconds)) if sequence == error.sequence else None
    return None
