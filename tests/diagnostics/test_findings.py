"""Who is found to be the cause in jobs that are made up, where each record has what it had at one moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from procgroup.diagnostics.recorded_job import stragglers
from procgroup.diagnostics.recorded_job.findings import JobFinding, find
from procgroup.diagnostics.recorded_job.job import Job, Rank, RecordedCall, RecordedGroup

WORLD = RecordedGroup("0", "0", 3, (0, 1, 2))
NOW = 100.0


def call(sequence: int, state: str, started: float) -> RecordedCall:
    """A broadcast of rank 0, which took 1 s where it has ended."""
    ended = 0.0 if state in ("started", "queued") else started + 1.0
    return RecordedCall(
        WORLD, sequence, "broadcast", "broadcast", False, 0, 8, state, "train.py:7", started, started, ended
    )


def job(*records: list[RecordedCall]) -> Job:
    """A job whose ranks all run."""
    ranks = [
        Rank(rank, len(records), "host", 1000 + rank, "train.py", "running", "", NOW, calls, [], "", 0.0, 0.0, 2)
        for rank, calls in enumerate(records)
    ]
    return Job("made up", Path(), ranks)


def found(*records: list[RecordedCall]) -> list[JobFinding]:
    return find(job(*records), NOW)


def test_only_the_rank_that_has_not_entered_a_call_is_late_for_it() -> None:
    # The root of a broadcast may have ended it, and gone on, while another rank waits in it for a third one.
    late = found(
        [call(1, "completed", 10.0), call(2, "completed", 90.0)],
        [call(1, "completed", 10.0), call(2, "started", 90.0)],
        [call(1, "completed", 10.0)],
    )
    said = [one.sentence.partition("; ")[0] for one in late]
    assert said == ["rank 2 never entered broadcast #2 of group 0 at train.py:7"]
    assert (late[0].ranks, late[0].waiting) == ((2,), (1,))


def test_after_the_end_of_a_job_the_rank_that_ended_too_early_is_named_and_where_the_call_failed() -> None:
    first, second = call(1, "completed", 10.0), call(2, "failed", 20.0)
    ended = job([first, second], [first])
    ended.ranks[0] = ended.ranks[0]._replace(state="failed", reason="PeerFailed: rank 1's program ended")
    ended.ranks[1] = ended.ranks[1]._replace(state="left")
    assert (
        "rank 1 never entered broadcast #2 of group 0 at train.py:7; its program ended without an error; the call "
        "failed on rank 0"
    ) in [one.sentence for one in find(ended, NOW)]


def test_where_all_ranks_have_entered_the_call_none_is_late() -> None:
    assert found([call(1, "completed", 90.0)], [call(1, "started", 90.0)], [call(1, "started", 91.0)]) == []


def test_a_gpu_that_has_not_finished_what_the_others_have_is_named_with_its_call_and_line() -> None:
    stuck = [call(2, "queued", 88.0), call(3, "queued", 89.0)]
    (late,) = found(
        [call(2, "completed", 88.0), call(3, "queued", 99.5)],
        stuck,
        [call(2, "completed", 88.0), call(3, "issued", 0.0)],
    )
    assert late.ranks == (1,) and late.waiting == ()
    assert late.sentence.startswith("the GPU of rank 1 has not finished broadcast #2 of group 0 at train.py:7")
    assert "those of ranks 0, 2 have" in late.sentence and "for 12.0 s, with 1 call behind it" in late.sentence


def test_where_no_gpu_has_finished_a_call_any_may_be_stuck() -> None:
    (late,) = found(*([call(2, "queued", 90.0)] for _ in range(3)))
    assert late.ranks == (0, 1, 2)
    assert late.sentence.startswith("the GPUs of ranks 0, 1, 2 have not finished broadcast #2")
    assert "one of them is stuck, before this call or in it" in late.sentence


def waiting_for_rank_1(calls: int) -> list[stragglers.Straggler]:
    """What is said of a job whose rank 1 begins each call half a second after the others, so often."""
    numbers = range(1, calls + 1)
    return stragglers.costly(
        stragglers.find(job(*[[call(n, "completed", 2.0 * n + rank / 2) for n in numbers] for rank in (0, 1, 0)]))
    )


def test_a_rank_that_is_last_in_a_few_calls_is_no_straggler() -> None:
    assert not waiting_for_rank_1(9)
    assert [one.rank for one in waiting_for_rank_1(10)] == [1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.000458, "458 us"), (0.01234, "12.3 ms"), (1.0, "1 s"), (12.345, "12.3 s")]
)
def test_short_waits_are_in_a_unit_of_their_size(seconds: float, text: str) -> None:
    assert stragglers.waiting_time(seconds) == text
