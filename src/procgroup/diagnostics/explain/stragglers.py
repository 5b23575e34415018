"""Which rank comes last to the collectives of a job, and how long the others wait for it.

The ranks of a collective *arrive* when they start it. Whoever arrives before the last one waits for that one: so long
the time is lost, whatever the transport does. Counted over the calls that the records still hold, and that every
member has completed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from procgroup.diagnostics.explain.recorded_job import Call, Job


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
            f"the others wait {total:.3g} s for it, {100 * self.share:.1f} % of their time"
        )


def find(job: Job) -> list[Straggler]:
    """Return the stragglers of each operation, those that cost most first."""
    collectives: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
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


def _window(job: Job, number: int) -> float:
    """Return how many seconds the calls of a rank span that its record holds."""
    rank = job.rank(number)
    times = [time for call in rank.calls for time in (call.started, call.ended) if time] if rank else []
    return max(times) - min(times) if times else 0.0
