"""Where a failure began is data that follows from the exception: of this rank, of a call, of another rank's end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from procgroup import errors
from procgroup.process.exit_reason import CALL, OWN, PEER, Origin, note_translated, origin_of, text_of

CALL_DATA: dict[str, Any] = {"op": "barrier", "sequence": 1, "group": "0", "rank": 0, "size": 4}


def lost(peer: int, **more: Any) -> errors.PeerLost:
    return errors.PeerLost(peer=peer, pid=7, how="gone", **(CALL_DATA | more))


@pytest.mark.parametrize(
    ("error", "origin"),
    [
        (ValueError("mine"), Origin(OWN)),
        (errors.DistNetworkError("no route"), Origin(OWN)),
        (errors.CollectiveTimeout(missing=[1], seconds=1.0, **CALL_DATA), Origin(CALL)),
        (errors.CollectiveMismatch(calls={0: "barrier", 1: "gather"}, **CALL_DATA), Origin(CALL)),
        (errors.Deadlock(waits={0: "recv"}, **CALL_DATA), Origin(CALL)),
        (lost(3), Origin(PEER, 3)),
        (lost(1, size=2, members=(4, 6)), Origin(PEER, 6)),
        (errors.PeerFailed(peer=2, reason="ValueError", **CALL_DATA), Origin(PEER, 2)),
        (errors.GroupBroken(reason="lost rank 2", peer=2, **CALL_DATA), Origin(PEER, 2)),
        (errors.GroupBroken(reason="lost rank 0", peer=0, **CALL_DATA), Origin(OWN)),
        (errors.GroupBroken(reason="aborted", **CALL_DATA), Origin(PEER)),
        (errors.StoreLost(host="a", port=1, reason="gone"), Origin(PEER)),
        (errors.BackwardFailed(ranks=[2]), Origin(PEER)),
    ],
)
def test_an_exception_tells_where_the_failure_began(error: Exception, origin: Origin) -> None:
    assert origin_of(error) == origin


def raised(*links: Callable[[], BaseException]) -> BaseException:
    """Raise each exception while the one before it is handled; return the last one."""
    error: BaseException | None = None
    for make in links:
        later = make()
        later.__context__ = error
        error = later
    assert error is not None
    return error


def test_of_chained_exceptions_the_first_one_decides() -> None:
    assert origin_of(raised(lambda: lost(1), lambda: KeyError("cleanup"))) == Origin(PEER, 1)
    assert origin_of(raised(lambda: KeyError("mine"), lambda: lost(1))) == Origin(OWN)
    assert origin_of(raised(lambda: ConnectionResetError(104), lambda: lost(1))) == Origin(PEER, 1)
    hidden = raised(lambda: lost(1), lambda: KeyError("mine"))
    hidden.__suppress_context__ = True
    assert origin_of(hidden) == Origin(OWN)


def test_a_chain_that_closes_in_a_circle_has_an_end() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__context__, second.__context__ = second, first
    assert origin_of(first) == Origin(OWN)


def test_an_error_that_a_library_raises_again_as_its_own_keeps_its_origin() -> None:
    error = lost(2, sequence=41)
    assert origin_of(RuntimeError(f"in a callback: {text_of(error)}")) == Origin(OWN)
    note_translated(error)
    assert origin_of(RuntimeError(f"in a callback: {text_of(error)}")) == Origin(PEER, 2)
    assert origin_of(RuntimeError("lost rank 2")) == Origin(OWN)
