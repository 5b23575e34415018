"""A job's checks by ranks that are threads: what rank 0 collects, and that a host which does not answer is named."""

from __future__ import annotations

import pytest

import procgroup as dist
from diagnostics.made_up_system import texts
from procgroup.diagnostics.doctor import comparison, links, machine
from procgroup.diagnostics.doctor.findings import Level, Section, note
from procgroup.diagnostics.doctor.job import Answers, Exchange, JobCheck, RankPlace
from procgroup.groups.group import ProcessGroup
from procgroup.testing import run_ranks

HOSTS = [0, 0, 1, 2]
"""The number of each rank's host."""


@pytest.fixture(autouse=True)
def one_check_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each host make one check only: the others have tests of their own."""
    monkeypatch.setattr(
        machine, "checks", lambda tries_port: {"Host": lambda: [note(f"tries MASTER_PORT: {tries_port}")]}
    )


def own_world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def place(rank: int) -> RankPlace:
    return RankPlace(f"host{HOSTS[rank]}", f"boot {HOSTS[rank]}", 1, "", "0-1")


def take_part() -> Answers | None:
    return JobCheck(own_world(), place(own_world().rank())).run()


def test_rank_0_collects_the_answers_of_all_hosts() -> None:
    answers, *others = run_ranks(take_part, 4, hosts=HOSTS, timeout=50)
    assert others == [None, None, None] and answers is not None
    assert [(host.name, host.ranks) for host in answers.hosts] == [("host0", (0, 1)), ("host1", (2,)), ("host2", (3,))]
    assert answers.checks == {rank: [Section("Host", [note("tries MASTER_PORT: False")])] for rank in (0, 2, 3)}
    assert set(answers.facts) == set(answers.reached) == {0, 2, 3}
    pairs = sorted((one.rank, one.peer) for one in answers.measurements)
    assert pairs == [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (2, 3), (3, 0), (3, 2)]
    assert all(one.speed and not one.error for one in answers.measurements)
    transports = {frozenset((one.rank, one.peer)): one.transport for one in answers.measurements}
    assert transports[frozenset((0, 1))] == "shared memory" and transports[frozenset((0, 2))] == "tcp"
    assert set(comparison.clock_offsets(answers)) == {"host1", "host2"}


def answer_with_a_place_only() -> Answers | None:
    rank = own_world().rank()
    if rank == 0:
        return JobCheck(own_world(), place(0), answer_seconds=0.5).run()
    exchange = Exchange(own_world().get_group_store(), rank)
    exchange.publish("place", place(2))
    exchange.collect("done", [0], 30)
    return None


def test_a_host_that_stops_answering_is_named() -> None:
    answers, _ = run_ranks(answer_with_a_place_only, 2, hosts=[0, 1], timeout=30)
    assert answers is not None
    (section,) = [section for section in comparison.sections(answers) if section.name == "Ranks"]
    (text,) = texts(section.findings, Level.PROBLEM)
    assert text.startswith("host1 did not answer in time: without its facts, its own checks")


def connect_but_measure_no_links() -> Answers | None:
    rank = own_world().rank()
    if rank == 0:
        return JobCheck(own_world(), place(0)).run()
    exchange = Exchange(own_world().get_group_store(), rank)
    exchange.publish("place", place(2))
    facts = {"versions": {}, "addresses": {}, "packets": {"eth0": 9000}, "data_address": "", "port": 1, "token": ""}
    exchange.publish("facts", facts)
    exchange.publish("checks", [])
    exchange.publish("reached", {})
    exchange.publish("links", [])
    exchange.collect("done", [0], 30)
    return None


def test_a_host_that_answers_no_message_is_named_with_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MESSAGE_SECONDS", 0.3)
    answers, _ = run_ranks(connect_but_measure_no_links, 2, hosts=[0, 1], timeout=30)
    assert answers is not None
    (section,) = [section for section in comparison.sections(answers) if section.name == "Links"]
    (text,) = texts(section.findings, Level.PROBLEM)
    assert text.startswith("the link from host0 to host1 was not measured: ") and "rank 1" in text


def test_a_rank_without_a_place_is_left_out() -> None:
    def only_rank_0() -> Answers | None:
        if own_world().rank() == 0:
            return JobCheck(own_world(), place(0), answer_seconds=0.2).run()
        Exchange(own_world().get_group_store(), 1).collect("done", [0], 30)
        return None

    answers, _ = run_ranks(only_rank_0, 2, timeout=30)
    assert answers is not None and answers.missing_ranks == [1]
