"""How ``procgroup metrics`` adds up the calls of a rank, of which its record holds the newest ones only."""

from __future__ import annotations

import pytest

from procgroup.diagnostics.metrics.totals import Total, Totals
from procgroup.diagnostics.recorded_job.job import Rank, RecordedCall, RecordedGroup

GROUP = RecordedGroup("1", "0", 2, (0, 1))


def rank_with(calls: list[RecordedCall], recorded: int) -> Rank:
    return Rank(0, 2, "host", 1, "train.py", "running", "", 0.0, calls, [], "", 0.0, 0.0, recorded)


def call(index: int, op: str = "all_reduce", ended: float = 3.0) -> RecordedCall:
    return RecordedCall(GROUP, index + 1, op, op, False, -1, 8, "completed", "", 1.0, 2.0, ended, index)


def test_a_call_counts_once_it_has_ended() -> None:
    totals = Totals()
    assert totals.count(rank_with([call(0), call(1, ended=0.0)], 2)) == {"all_reduce": Total(1, 8, 1.0)}
    assert totals.count(rank_with([call(0), call(1, ended=5.0)], 2)) == {"all_reduce": Total(2, 16, 4.0)}
    assert totals.count(rank_with([call(1, ended=5.0)], 2)) == {"all_reduce": Total(2, 16, 4.0)}


def test_a_call_that_stays_in_the_record_counts_once_however_often_it_is_looked_at() -> None:
    totals = Totals()
    calls = [call(index) for index in range(3)]
    for seen in (1, 2, 3, 3):
        assert totals.count(rank_with(calls[:seen], seen)) == {"all_reduce": Total(seen, 8 * seen, seen)}


def test_calls_that_the_record_has_lost_are_taken_to_be_like_the_others() -> None:
    totals = Totals()
    totals.count(rank_with([call(0)], 1))
    held = [call(9000 + index, "barrier" if index % 4 == 0 else "all_reduce") for index in range(1000)]
    found = totals.count(rank_with(held, 10_001))
    assert found["all_reduce"].calls == pytest.approx(1 + 7500) and found["barrier"].calls == pytest.approx(2500)
