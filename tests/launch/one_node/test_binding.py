"""--numa-binding: which CPUs each rank gets on hosts of every kind, and that ranks are bound before they start."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.made_up_host import interleaved, server, write_topology
from procgroup.cluster.topology import CpuTopology, format_cpus
from procgroup.launch.ranks.binding import bind
from procgroup.launch.ranks.rank_process import dying_with_this_process
from world import run_command

SHOW = "import os; print(*sorted(os.sched_getaffinity(0)), 'threads', os.environ['OMP_NUM_THREADS'])"


@pytest.fixture
def topology(tmp_path: Path) -> CpuTopology:
    return write_topology(tmp_path, server())


def shares(by: str, ranks: int, topology: CpuTopology, *gpu_nodes: int | None) -> list[str]:
    return [format_cpus(cpus) for cpus in bind(by, ranks, topology, gpu_nodes).cpus]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("node", ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
        ("socket", ["0-7,16-23", "0-7,16-23", "8-15,24-31", "8-15,24-31"]),
        ("exclusive", ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
        ("core-complex", ["0-1,16-17", "4-5,20-21", "8-9,24-25", "12-13,28-29"]),
        ("cores", ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
    ],
)
def test_without_gpus_the_ranks_are_spread_over_the_host(topology: CpuTopology, by: str, expected: list[str]) -> None:
    assert shares(by, 4, topology) == expected
    assert bind(by, 4, topology).note == ""


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("node", ["8-11,24-27", "8-11,24-27", "0-3,16-19"]),
        ("socket", ["8-15,24-31", "8-15,24-31", "0-7,16-23"]),
        ("exclusive", ["8-9,24-25", "10-11,26-27", "0-3,16-19"]),
        ("core-complex", ["8-9,24-25", "10-11,26-27", "0-1,16-17"]),
    ],
)
def test_a_rank_is_bound_beside_its_gpu(topology: CpuTopology, by: str, expected: list[str]) -> None:
    assert shares(by, 3, topology, 2, 2, 0) == expected


def test_ranks_whose_gpu_s_node_is_not_known_or_not_usable_are_spread(tmp_path: Path) -> None:
    topology = write_topology(tmp_path, server(), usable=range(8))
    assert shares("node", 3, topology, None, 3, 0) == ["0-3", "4-7", "0-3"]


def test_a_core_is_never_divided_and_the_first_ranks_get_what_is_left_over(topology: CpuTopology) -> None:
    assert shares("cores", 3, topology) == ["0-5,16-21", "6-10,22-26", "11-15,27-31"]
    assert shares("exclusive", 6, topology, *[0] * 3, *[1] * 3)[:3] == ["0-1,16-17", "2,18", "3,19"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("by", ["cores", "exclusive"])
def test_shares_are_disjoint_while_there_are_cores_enough(topology: CpuTopology, by: str, ranks: int) -> None:
    binding = bind(by, ranks, topology)
    assert sum(map(len, binding.cpus)) == len(frozenset().union(*binding.cpus))
    assert binding.note == ""
    assert by == "exclusive" or frozenset().union(*binding.cpus) == topology.usable


def test_neighbouring_ranks_are_on_one_socket_where_numbers_alternate(tmp_path: Path) -> None:
    assert shares("cores", 4, write_topology(tmp_path, interleaved())) == ["0,2", "4,6", "1,3", "5,7"]


@pytest.mark.parametrize(
    ("by", "ranks", "usable", "note"),
    [
        ("cores", 3, [0, 1], "too few cores: ranks 0-1 share CPU 0"),
        ("exclusive", 4, [0, 16, 1], "too few cores: ranks 0-1 share CPUs 0,16; ranks 2-3 share CPU 1"),
        ("core-complex", 3, range(4), "too few core complexes: ranks 0,2 share CPUs 0-1"),
        ("node", 2, range(4), "no effect: the usable CPUs 0-3 are of one NUMA node"),
        ("socket", 2, range(8), "no effect: the usable CPUs 0-7 are of one socket"),
    ],
)
def test_a_host_that_is_too_small_is_shared_and_that_is_said(
    tmp_path: Path, by: str, ranks: int, usable: list[int], note: str
) -> None:
    binding = bind(by, ranks, write_topology(tmp_path, server(), usable))
    assert all(binding.cpus)
    assert note in binding.note


@pytest.mark.parametrize("flag", ["--numa-binding", "--numa_binding", "--bind", None])
def test_each_rank_starts_on_its_own_cores(launcher: Any, flag: str | None) -> None:
    topology = CpuTopology.of_this_process()
    ranks = min(2, len(topology.cores))
    given, environment = ([flag, "cores"], {}) if flag else ([], {"PET_NUMA_BINDING": "cores"})
    done = launcher.run(SHOW, "-n", str(ranks), *given, environment={"OMP_NUM_THREADS": "", **environment})
    assert done.returncode == 0, done.stderr
    expected = [" ".join(map(str, sorted(cpus))) for cpus in bind("cores", ranks, topology).cpus]
    found = [line.partition("] ")[2].partition(" threads ")[0] for line in sorted(done.stdout.splitlines())]
    assert found == expected
    assert "--numa-binding" not in done.stderr


def test_ranks_that_share_a_core_are_told_so_in_one_line_and_get_a_thread_each(launcher: Any) -> None:
    core = min(os.sched_getaffinity(0))
    script = launcher.script(SHOW)
    command = ["-m", "procgroup", "run", "-n", "3", "--bind", "exclusive", str(script)]
    source = (
        f"import os, sys; os.sched_setaffinity(0, [{core}]); os.execv(sys.executable, [sys.executable, *{command}])"
    )
    done = run_command([sys.executable, "-c", source], environment={"OMP_NUM_THREADS": ""})
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {core} threads 1" for rank in range(3)]
    assert done.stderr.count(f"has too few cores: ranks 0-2 share CPU {core}\n") == 1


def test_a_system_that_refuses_the_binding_gets_the_rank_unbound_and_a_line() -> None:
    done = run_command(dying_with_this_process(["echo", "started"], cpus=[4000]))
    assert done.stdout == "started\n"
    assert done.stderr == "procgroup run: cannot bind this rank to CPUs 4000: Invalid argument; not bound\n"
