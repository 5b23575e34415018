"""What the usable CPUs share: cores, core complexes, NUMA nodes, sockets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.made_up_host import interleaved, server, write_topology
from procgroup.cluster.topology import CpuTopology, format_cpus, parse_cpus


def shown(groups: list[frozenset[int]]) -> list[str]:
    return [format_cpus(group) for group in groups]


def test_cpus_are_grouped_by_what_they_share(tmp_path: Path) -> None:
    topology = write_topology(tmp_path, server())
    assert shown(topology.sockets) == ["0-7,16-23", "8-15,24-31"]
    assert {node: format_cpus(cpus) for node, cpus in topology.nodes.items()} == {
        0: "0-3,16-19",
        1: "4-7,20-23",
        2: "8-11,24-27",
        3: "12-15,28-31",
    }
    assert shown(topology.core_complexes)[:3] == ["0-1,16-17", "2-3,18-19", "4-5,20-21"]
    assert shown(topology.cores)[:2] == ["0,16", "1,17"]
    assert len(topology.cores) == 16


def test_neighbouring_cores_are_on_one_node_also_where_numbers_alternate(tmp_path: Path) -> None:
    topology = write_topology(tmp_path, interleaved())
    assert shown(topology.cores) == ["0", "2", "4", "6", "1", "3", "5", "7"]


def test_cpus_that_this_process_may_not_use_are_left_out(tmp_path: Path) -> None:
    topology = write_topology(tmp_path, server(), usable=[1, 2, 18, 31])
    assert shown(topology.cores) == ["1", "2,18", "31"]
    assert {node: format_cpus(cpus) for node, cpus in topology.nodes.items()} == {0: "1-2,18", 3: "31"}
    assert shown(topology.core_complexes) == ["1", "2,18", "31"]


def test_where_the_system_shows_nothing_nothing_is_divided(tmp_path: Path) -> None:
    topology = CpuTopology(frozenset({0, 1, 5}), tmp_path)
    assert shown(topology.cores) == ["0", "1", "5"]
    assert shown(topology.core_complexes) == shown(topology.sockets) == ["0-1,5"]
    assert topology.nodes == {0: frozenset({0, 1, 5})}


def test_this_host_has_each_usable_cpu_once() -> None:
    topology = CpuTopology.of_this_process()
    for groups in (topology.cores, topology.core_complexes, topology.sockets, list(topology.nodes.values())):
        assert sorted(cpu for group in groups for cpu in group) == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(("text", "cpus"), [("", set()), ("3", {3}), ("0-2,5\n", {0, 1, 2, 5}), ("7,8-9", {7, 8, 9})])
def test_lists_of_cpus_are_read_and_written(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
    assert parse_cpus(format_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1;2"])
def test_another_text_is_no_list_of_cpus(text: str) -> None:
    with pytest.raises(ValueError, match="expected CPUs such as 0-3,8"):
        parse_cpus(text)
