"""Hosts against each other, from answers that are written down: what is named, and how bad it is."""

from __future__ import annotations

from typing import Any

import pytest

from diagnostics.made_up_system import one, texts
from procgroup.diagnostics.doctor import comparison, speed_comparison
from procgroup.diagnostics.doctor.findings import Finding, Level
from procgroup.diagnostics.doctor.job import Answers, DoctorHost, Measurement, RankPlace, hosts_of
from procgroup.diagnostics.doctor.links import LARGEST_BYTES, Speed
from procgroup.diagnostics.doctor.reachability import ANOTHER_HOST, REACHED, REFUSED, SILENT
from procgroup.diagnostics.doctor.speed_comparison import Direction


def place(name: str, boot: str = "", network: int = 1, cpus: int = 4, host_id: str = "") -> RankPlace:
    return RankPlace(name, boot or f"boot of {name}", network, host_id, f"0-{cpus - 1}")


def facts(address: str, **more: Any) -> dict[str, Any]:
    versions = {"procgroup": "0.1.0", "Python": "3.11.2", "numpy": "2.1.0"}
    addresses = {address: "eth0", "172.17.0.1": "docker0"}
    return {
        "versions": versions,
        "addresses": addresses,
        "packets": {"eth0": 1500},
        "data_address": address,
        "port": 1,
        "token": "",
        **more,
    }


def answers(
    n1_to_n2: dict[str, str] | None = None,
    n2_to_n1: dict[str, str] | None = None,
    measurements: list[Measurement] | None = None,
    **more: Any,
) -> Answers:
    """Return the answers of the hosts n1 (ranks 0 and 1) and n2 (rank 2), which reach each other by default."""
    hosts = hosts_of({0: place("n1"), 1: place("n1"), 2: place("n2")})
    reached = {
        0: {"2": {"172.17.0.1": ANOTHER_HOST, **(n1_to_n2 or {"10.0.0.2": REACHED})}},
        2: {"0": {"172.17.0.1": ANOTHER_HOST, **(n2_to_n1 or {"10.0.0.1": REACHED})}},
    }
    given = {
        "hosts": hosts,
        "missing_ranks": [],
        "facts": {0: facts("10.0.0.1"), 2: facts("10.0.0.2")},
        "checks": {0: [], 2: []},
        "reached": reached,
        "measurements": measurements or [],
        "measured_by": {0, 1, 2},
    }
    return Answers(**{**given, **more})


def findings(given: Answers) -> list[Finding]:
    return [finding for section in comparison.sections(given) for finding in section.findings]


# --- ranks and hosts ---


def test_ranks_are_on_one_host_by_kernel_and_network() -> None:
    found = hosts_of(
        {0: place("n1"), 1: place("n2"), 2: place("n1"), 3: place("n1", network=2), 4: place("n1", host_id="x")}
    )
    assert [(host.name, host.ranks) for host in found] == [
        ("n1 (rank 0)", (0, 2)),
        ("n2", (1,)),
        ("n1 (rank 3)", (3,)),
        ("n1 (rank 4)", (4,)),
    ]


def test_a_job_in_which_all_is_well_has_no_warnings() -> None:
    assert {finding.level for finding in findings(answers())} <= {Level.OK, Level.NOTE}


def test_a_host_without_answers_is_named_with_what_is_missing() -> None:
    given = answers(checks={0: []}, reached={0: {}}, measured_by={0, 1})
    found = one(findings(given), Level.PROBLEM)
    assert found.text == (
        "n2 did not answer in time: without its own checks, its connections to other hosts, its links"
    )


def test_ranks_that_did_not_answer_at_all_are_named() -> None:
    assert "did not answer: 3, 5" in one(findings(answers(missing_ranks=[3, 5])), Level.PROBLEM).text


def test_more_ranks_than_cpus_are_a_warning() -> None:
    hosts = hosts_of({0: place("n1", cpus=1), 1: place("n1", cpus=1), 2: place("n2")})
    found = one(findings(answers(hosts=hosts)), Level.WARNING)
    assert found.text.startswith("n1 has ranks 0 to 1, which may use 1 CPUs together")


def test_containers_of_one_machine_are_named() -> None:
    hosts = hosts_of({0: place("n1", boot="1"), 1: place("n1", boot="1"), 2: place("n2", boot="1", network=2)})
    assert one(findings(answers(hosts=hosts)), Level.WARNING).text.startswith(
        "n1, n2 are one machine with several network"
    )


# --- versions ---


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("procgroup", "0.2.0", Level.PROBLEM),
        ("Python", "3.12.1", Level.WARNING),
        ("Python", "3.11.9", Level.NOTE),
        ("numpy", "1.26.4", Level.WARNING),
        ("torch", "2.13.0", Level.WARNING),
    ],
)
def test_versions_that_differ_are_named_with_their_hosts(name: str, version: str, level: Level) -> None:
    installed = {"procgroup": "0.1.0", "Python": "3.11.2", "numpy": "2.1.0"}
    found = list(comparison.versions({"n1": installed, "n2": {**installed, name: version}, "n3": installed}))
    text = one(found, level).text
    assert text == f"{name} differs: {installed.get(name, 'none')} on n1, n3; {version} on n2"
    assert texts(found, Level.OK)[0].startswith("equal on all hosts: ")


# --- clocks ---


@pytest.mark.parametrize(
    ("offset", "error", "level", "text"),
    [
        (0.00001, 0.00005, Level.OK, "the clocks of n1 and n2 are equal, to 0.05 ms"),
        (0.25, 0.0001, Level.OK, "the clock of n2 is 250 ms ahead of that of n1"),
        (-0.0042, 0.0001, Level.OK, "the clock of n2 is 4.2 ms behind that of n1"),
        (-90.0, 0.0001, Level.WARNING, "the clock of n2 is 90 s behind that of n1: their logs cannot be compared"),
        (1.2, 0.5, Level.OK, "the clock of n2 is 1.2 s ahead of that of n1"),
    ],
)
def test_clocks_may_differ_by_less_than_a_second(offset: float, error: float, level: Level, text: str) -> None:
    speed = Speed(1e9, LARGEST_BYTES, 1e-4, offset, error)
    (found,) = comparison.clocks(answers(measurements=[Measurement(0, 2, "tcp", speed)]))
    assert (found.level, found.text) == (level, text)


# --- addresses ---


def test_an_address_that_all_hosts_reach_is_fine_and_one_that_every_host_has_is_a_note() -> None:
    found = list(comparison.reached(answers()))
    assert texts(found, Level.OK) == [
        "n1 is reached at 10.0.0.1 (eth0) from n2",
        "n2 is reached at 10.0.0.2 (eth0) from n1",
    ]
    assert "n1 is not reached at 172.17.0.1 (docker0): another host has this address" in texts(found, Level.NOTE)


def test_a_host_that_can_connect_out_but_not_be_connected_to_has_a_firewall() -> None:
    found = one(comparison.reached(answers(n1_to_n2={"10.0.0.2": SILENT})), Level.PROBLEM)
    assert found.text.startswith("n1 cannot connect to n2 at any address: ")
    assert "10.0.0.2 (eth0): no answer, as if a firewall drops the packets" in found.text
    assert found.text.endswith("n2 does connect to n1, so one direction is blocked")
    assert "Let the firewall of n2, or one between the hosts, pass TCP" in found.advice


def test_a_refusal_is_told_apart_from_silence() -> None:
    found = one(comparison.reached(answers(n1_to_n2={"10.0.0.2": REFUSED})), Level.PROBLEM)
    assert "10.0.0.2 (eth0): refused, although a program listens there" in found.text


def test_two_hosts_that_do_not_reach_each_other_need_a_route() -> None:
    unreachable = "No route to host"
    given = answers(n1_to_n2={"10.0.0.2": unreachable}, n2_to_n1={"10.0.0.1": unreachable})
    found = texts(comparison.reached(given), Level.PROBLEM)
    assert len(found) == 2 and all(unreachable in text for text in found)


def test_a_network_that_not_all_hosts_reach_must_not_carry_the_data() -> None:
    of_b = facts("10.0.0.2", addresses={"10.0.0.2": "eth0", "10.1.0.2": "eth1"})
    given = answers(n1_to_n2={"10.0.0.2": SILENT, "10.1.0.2": REACHED}, facts={0: facts("10.0.0.1"), 2: of_b})
    found = one(comparison.reached(given), Level.PROBLEM)
    assert "n1 does not reach n2 at 10.0.0.2, where the data goes: no answer; it does reach 10.1.0.2" in found.text
    assert "MASTER_ADDR" in found.advice


def test_a_host_that_has_not_tried_is_left_out() -> None:
    given = answers(reached={0: {}, 2: {"0": {"10.0.0.1": REACHED, "172.17.0.1": ANOTHER_HOST}}})
    assert {finding.level for finding in comparison.reached(given)} == {Level.OK, Level.NOTE}


def test_a_host_without_addresses_is_a_problem() -> None:
    given = answers(facts={0: facts("10.0.0.1"), 2: facts("", addresses={})})
    assert one(comparison.reached(given), Level.PROBLEM).text.startswith("n2 has no address")


# --- links ---


def direction(source: str, target: str, bandwidth: float = 1e9, latency: float = 1e-4) -> Direction:
    return Direction(source, target, "tcp", bandwidth, latency, LARGEST_BYTES)


def measured(pairs: list[tuple[int, int]], bandwidth: float = 2e9, transport: str = "tcp") -> list[Measurement]:
    """Return both ends' measurements of links."""
    both = []
    for lower, upper in pairs:
        both.append(Measurement(lower, upper, transport, Speed(bandwidth, LARGEST_BYTES, 4e-5, 0.0, 1e-5)))
        both.append(Measurement(upper, lower, transport, Speed(bandwidth / 2, LARGEST_BYTES)))
    return both


def test_a_link_has_a_latency_and_a_bandwidth_each_way() -> None:
    found = list(speed_comparison.links(answers(measurements=measured([(0, 2)]))))
    assert texts(found, Level.OK) == ["n1 and n2: 40 us, 2 GB/s to n2, 1 GB/s to n1"]


def test_a_link_within_a_host_has_a_transport_which_should_be_shared_memory() -> None:
    shared = measured([(0, 1)], transport="shared memory")
    found = texts(speed_comparison.links(answers(measurements=shared)), Level.OK)
    assert found == ["within n1: shared memory, 40 us, 1 GB/s"]
    found = texts(speed_comparison.links(answers(measurements=measured([(0, 1)]))), Level.WARNING)
    assert found == ["within n1: tcp, 40 us, 1 GB/s; the ranks of this host share no memory"]


def test_a_link_below_half_of_the_median_is_named() -> None:
    found = [direction("n1", "n2"), direction("n2", "n1"), direction("n1", "n3", 0.41e9), direction("n3", "n1", 0.6e9)]
    assert not list(speed_comparison.slow(found))
    found[2] = direction("n1", "n3", 50e6)
    assert texts(speed_comparison.slow(found), Level.WARNING) == [
        "slow link from n1 to n3: 50 MB/s, the median of all is 0.8 GB/s"
    ]


def test_a_latency_above_twice_the_median_is_named_unless_it_is_noise() -> None:
    links = [direction("n1", "n2"), direction("n2", "n1"), direction("n2", "n3", latency=3e-4)]
    assert texts(speed_comparison.slow(links), Level.WARNING) == [
        "late link from n2 to n3: 300 us, the median of all is 100 us"
    ]
    quick = [
        direction("n1", "n2", latency=5e-6),
        direction("n2", "n1", latency=5e-6),
        direction("n2", "n3", latency=3e-5),
    ]
    assert not list(speed_comparison.slow(quick))


def test_the_two_ways_of_a_link_within_one_host_are_not_compared() -> None:
    both = measured([(0, 1)], transport="shared memory")
    both[1] = both[1]._replace(speed=Speed(1e6, LARGEST_BYTES))
    assert not texts(speed_comparison.links(answers(measurements=both)), Level.WARNING)


def test_one_link_alone_is_not_slow() -> None:
    assert not list(speed_comparison.slow([direction("n1", "n2", 1.0)]))


def test_a_link_that_was_not_measured_is_a_problem_with_its_reason_and_the_sizes_of_packets() -> None:
    failed = [Measurement(0, 2, "tcp", None, "no answer within 10 s"), Measurement(2, 0, "tcp", None, "the same")]
    found = one(speed_comparison.links(answers(measurements=failed)), Level.PROBLEM)
    assert found.text == "the link from n1 to n2 was not measured: no answer within 10 s"
    assert found.advice.endswith("eth0 1500; eth0 1500")


def test_many_links_are_summed_up() -> None:
    names = [f"node{number}" for number in range(8)]
    hosts = [DoctorHost(name, (rank,), (place(name),)) for rank, name in enumerate(names)]
    pairs = [(lower, upper) for upper in range(8) for lower in range(upper)]
    found = list(speed_comparison.links(answers(hosts=hosts, measurements=measured(pairs))))
    assert texts(found, Level.OK)[0].startswith("28 pairs of hosts: 40 us and 1.5 GB/s in the median; 1 GB/s from ")


def test_the_measured_values_have_names_of_hosts() -> None:
    given = comparison.measured(answers(measurements=measured([(0, 2)])))
    assert given["clock_offsets"] == {"n2": 0.0}
    assert given["reached"]["n1"]["n2"]["10.0.0.2"] == REACHED
    assert [(link["source"], link["target"], link["bandwidth"]) for link in given["links"]] == [
        ("n1", "n2", 2e9),
        ("n2", "n1", 1e9),
    ]
