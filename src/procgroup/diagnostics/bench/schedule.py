"""Who measures when, and for how long: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

SHORTEST_SAMPLE_NS = 10_000
"""A sample takes at least this long, so that reading the clock (about 50 ns) costs less than a percent of it."""

SHORTEST_SHARED_SAMPLE_NS = 5_000_000
"""The same where ranks share cores: in a shorter sample a rank that may run ahead of the others measures its own turns
on the core, and the median leaves out its waits for theirs."""

FEWEST_SAMPLES = 3
MOST_SAMPLES = 1000


@dataclass(frozen=True)
class Plan:
    """What a peer does in one round: ``samples`` times ``calls`` calls in a row."""

    samples: int
    calls: int


def rotating_order(names: Sequence[str], round_index: int) -> list[str]:
    """Return the order of the peers in a round: rotated every second round, and backwards in the odd ones.

    Over ``2 * len(names)`` rounds each peer stands twice at each place, and follows each neighbour as often as it
    precedes it, so what one peer leaves in the caches is not always found by the same other one.
    """
    shift = (round_index // 2) % len(names) if names else 0
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if round_index % 2 else order


def plan_for(call_ns: float, seconds: float, *, shares_cores: bool = False) -> Plan:
    """Return the plan that fills about ``seconds`` with calls of ``call_ns`` nanoseconds each."""
    call_ns = max(call_ns, 1.0)
    calls = max(1, ceil((SHORTEST_SHARED_SAMPLE_NS if shares_cores else SHORTEST_SAMPLE_NS) / call_ns))
    samples = int(seconds * 1e9 / (calls * call_ns))
    return Plan(samples=min(max(samples, FEWEST_SAMPLES), MOST_SAMPLES), calls=calls)
