"""Which rank comes last to the collectives of a job, and how long the others wait for it.

The ranks of a collective *arrive* when they start it. Whoever arrives before the last one waits for that one: so long
the time is lost, whatever the transport does. Counted over the calls that the records still hold, and that every
member has completed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from procgroup.diagnostics.recorded_job.job import Job, RecordedCall

NOTICEABLE_SHARE = 0.01
"""The share of the others' time from which on a straggler is worth a line."""

# The first calls of a job wait for ranks that start later.
_TELLING_CALLS = 10


class Straggler(NamedTuple):
    """How often one rank was the last in an operation, and what that cost the others.

    ``waited`` has the seconds that each other rank waited for it; ``share`` is their sum over the wall time of these
    ranks in the recorded window, from 0 to 1.
    """

    rank: int
    op: str
    calls: int
    last: int
    waited: dict[int, float]
    share: float

    def __str__(self) -> str:
        """Return the straggler as a sentence."""
        total = sum(self.waited.values())
        return (
            f"rank {self.rank} is the last in {self.last} of {self.calls} calls of {self.op}; "
            f"the others wait {waiting_time(total)} for it, {100 * self.share:.1f} % of their time"
        )


def waiting_time(seconds: float) -> str:
    """Return "1.25 s", "12.5 ms" or "458 us"."""
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"


def find(job: Job) -> list[Straggler]:
    """Return the stragglers of each operation, those that cost most first."""
    collectives: dict[tuple[str, int], dict[int, RecordedCall]] = defaultdict(dict)
    for rank in job.ranks:
        for call in rank.calls:
            if not call.is_message and call.state == "completed" and call.group.size > 1:
                collectives[call.group.key, call.sequence][rank.rank] = call
    counts: dict[str, int] = defaultdict(int)
    lasts: dict[tuple[int, str], int] = defaultdict(int)
    waited: dict[tuple[int, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for calls in collectives.values():
        call = next(iter(calls.values()))
        if len(calls) < call.group.size:
            continue
        last = max(calls, key=lambda number: calls[number].started)
        counts[call.op] += 1
        lasts[last, call.op] += 1
        for number, one in calls.items():
            if number != last:
                wait = min(calls[last].started, one.ended) - one.started
                waited[last, call.op][number] += max(wait, 0.0)
    found = []
    for (last, op), times in lasts.items():
        others = waited[last, op]
        wall = sum(_window(job, other) for other in others)
        share = sum(others.values()) / wall if wall else 0.0
        found.append(Straggler(last, op, counts[op], times, dict(others), share))
    return sorted(found, key=lambda one: one.share, reverse=True)


def costly(found: Iterable[Straggler]) -> list[Straggler]:
    """Return the stragglers that cost the others a noticeable share of their time, of operations with enough calls."""
    return [one for one in found if one.share >= NOTICEABLE_SHARE and one.calls >= _TELLING_CALLS]


def waiting_shares(job: Job, found: Sequence[Straggler]) -> dict[int, float]:
    """Return for each rank which share of its recorded time it has waited for others, from 0 to 1."""
    waited: dict[int, float] = defaultdict(float)
    for one in found:
        for number, seconds in one.waited.items():
            waited[number] += seconds
    windows = {rank.rank: _window(job, rank.rank) for rank in job.ranks}
    return {number: waited[number] / window if window else 0.0 for number, window in windows.items()}


def slowest(found: Sequence[Straggler]) -> int | None:
    """Return the rank that the others have waited for longest; None for a share of their time that does not matter."""
    shares: dict[int, float] = defaultdict(float)
    for one in found:
        if one.calls >= _TELLING_CALLS:
            shares[one.rank] += one.share
    rank = max(shares, key=lambda number: shares[number], default=None)
    return rank if rank is not None and shares[rank] >= NOTICEABLE_SHARE else None


def _window(job: Job, number: int) -> float:
    """Return how many seconds the calls of a rank span that its record holds."""
    rank = job.rank(number)
    times = [time for call in rank.calls for time in (call.started, call.ended) if time] if rank else []
    return max(times) - min(times) if times else 0.0
