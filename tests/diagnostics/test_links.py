"""Links: the rounds in which hosts meet, and what two ranks measure by messages."""

from __future__ import annotations

import itertools
import time

import pytest

import procgroup as dist
from procgroup.diagnostics.doctor import links
from procgroup.diagnostics.doctor.links import Speed, measure_as_initiator, measure_as_partner, rounds
from procgroup.testing import RanksFailed, run_ranks

AHEAD = 3_000_000_000


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 7, 8])
def test_all_pairs_meet_once_and_nobody_twice_in_a_round(number: int) -> None:
    found = rounds(number)
    assert sorted(pair for pairs in found for pair in pairs) == list(itertools.combinations(range(number), 2))
    for pairs in found:
        met = [host for pair in pairs for host in pair]
        assert len(met) == len(set(met))
    assert len(found) == (0 if number < 2 else number - 1 + number % 2)


def measure() -> Speed:
    world = dist.group.WORLD
    assert world is not None
    if world.rank() == 0:
        return measure_as_initiator(world, 1)
    return measure_as_partner(world, 0, lambda: time.time_ns() + AHEAD)


@pytest.mark.parametrize("hosts", [None, [0, 1]], ids=["shared memory", "tcp"])
def test_both_ways_have_a_bandwidth_and_the_initiator_a_latency(hosts: list[int] | None) -> None:
    initiator, partner = run_ranks(measure, 2, hosts=hosts)
    assert initiator.bandwidth > 0 and partner.bandwidth > 0
    assert initiator.size in (links.LARGEST_BYTES // 4**power for power in range(5))
    assert initiator.latency is not None and 0 < initiator.latency < 1
    assert partner.latency is None


def test_the_initiator_finds_how_far_the_partner_s_clock_is_ahead() -> None:
    initiator, partner = run_ranks(measure, 2)
    assert initiator.clock_offset is not None and initiator.clock_error is not None
    assert abs(initiator.clock_offset - AHEAD / 1e9) <= initiator.clock_error + 0.001
    assert partner.clock_offset is None


def test_a_partner_that_does_not_come_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MESSAGE_SECONDS", 0.3)

    def wait_alone() -> None:
        world = dist.group.WORLD
        assert world is not None
        if world.rank() == 0:
            try:
                measure_as_initiator(world, 1)
            finally:
                world.get_group_store().set("done", "")
        else:
            world.get_group_store().wait(["done"])

    with pytest.raises(RanksFailed) as failed:
        run_ranks(wait_alone, 2)
    (error,) = failed.value.errors.values()
    assert isinstance(error, dist.CollectiveTimeout) and error.missing == (1,)
