from __future__ import annotations

from collections import Counter
from itertools import cycle, pairwise
from typing import Any

import pytest

from procgroup.diagnostics.bench.report import parse_size, size_text
from procgroup.diagnostics.bench.rounds import (
    FEWEST_SAMPLES,
    MOST_SAMPLES,
    InterleavedRun,
    Plan,
    plan_for,
    rotating_order,
)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_peer_stands_at_every_place_equally_often(count: int) -> None:
    names = "abcde"[:count]
    places = Counter((name, i) for r in range(2 * count) for i, name in enumerate(rotating_order(names, r)))
    assert places == {(name, i): 2 for name in names for i in range(count)}


def test_no_peer_always_follows_the_same_other_one() -> None:
    neighbours = Counter(pair for r in range(10) for pair in pairwise(rotating_order("abcde", r)))
    assert all(neighbours[after, before] == times for (before, after), times in neighbours.items())


def test_no_peers_have_an_order_too() -> None:
    assert rotating_order([], 3) == []


@pytest.mark.parametrize("call_ns", [100, 700, 9_999, 10_000, 150_000, 2_000_000])
def test_a_plan_fills_the_time_with_samples_that_the_clock_can_resolve(call_ns: float) -> None:
    plan = plan_for(call_ns, seconds=0.1)
    assert plan.calls * call_ns >= 10_000
    assert plan.samples * plan.calls * call_ns <= 0.1 * 1e9
    assert plan.samples >= min(MOST_SAMPLES, 0.1 * 1e9 / max(call_ns, 20_000)) * 0.9


def test_samples_of_ranks_that_share_cores_are_long_enough_for_the_turns_of_all() -> None:
    plan = plan_for(700, seconds=0.1, shares_cores=True)
    assert plan.calls * 700 >= 5_000_000
    assert plan.samples == 19


def test_a_slow_call_is_still_measured_a_few_times() -> None:
    assert plan_for(155e6, seconds=0.1).samples == FEWEST_SAMPLES


class PeerOfABusyMachine:
    """One call in three takes 1 µs; for the others the ranks wait for their cores, 5 ms each."""

    def __init__(self) -> None:
        self.calls_ns = cycle([1_000, 5_000_000, 5_000_000])
        self.total_ns = 0

    def measure(self, operation: str, size: int, plan: Plan, timeout: float) -> list[float]:
        samples = [sum(next(self.calls_ns) for _ in range(plan.calls)) for _ in range(plan.samples)]
        self.total_ns += sum(samples)
        return [sample / plan.calls for sample in samples]


def test_a_machine_whose_cores_others_hold_prolongs_a_size_by_little() -> None:
    peer: Any = PeerOfABusyMachine()
    run = InterleavedRun("all_reduce", {"procgroup": peer}, rounds=1, seconds=0.1, timeout=1, tell=print)
    (result,) = run.sizes([8])
    assert result.rounds["procgroup"]
    assert peer.total_ns < 0.5e9


def test_a_call_that_takes_no_time_has_a_plan() -> None:
    assert plan_for(0.0, seconds=0.1).calls == 10_000


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("64K", 65536), ("1m", 1 << 20), (" 256M ", 256 << 20)])
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert size_text(size) == text.strip().upper()


@pytest.mark.parametrize("text", ["", "0", "7", "-8", "8 bytes", "1.5M", "K", "1T"])
def test_sizes_that_are_no_whole_elements_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)
