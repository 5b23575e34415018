"""What the flags about devices and cores mean together on one host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.made_up_host import Cpu, write_gpus, write_topology
from procgroup.cluster.control_group import usable_cores
from procgroup.launch import flags
from procgroup.launch.ranks.placement import Placement, place


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return two CPUs that this process may really use."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        pytest.skip("this process may use one CPU only")
    return found[:2]


@pytest.fixture
def root(tmp_path: Path, cpus: list[int]) -> Path:
    """Make up a host with two sockets, the second of which has the first GPU and nothing but one CPU."""
    second = cpus[1]
    others = sorted(os.sched_getaffinity(0) - {second})
    on_first = [Cpu(cpu, cpu, 0, 0, 0) for cpu in others]
    write_topology(tmp_path, [*on_first, Cpu(second, second, 1, 1, 1)])
    write_gpus(tmp_path, {"0000:17:00.0": 1, "0000:65:00.0": 0})
    return tmp_path


def placed(root: Path, *given: str) -> Placement:
    return place(flags.parse("procgroup run", [*given, "a.py"]), root)


@pytest.mark.parametrize("flag", ["node", "socket", "exclusive", "core-complex"])
def test_a_rank_is_bound_beside_the_gpu_that_it_uses(root: Path, cpus: list[int], flag: str) -> None:
    found = placed(root, "-n", "2", "--numa-binding", flag).cpus
    assert found is not None
    assert found[0] == {cpus[1]}
    assert cpus[0] in found[1]
    assert found[0].isdisjoint(found[1])


def test_the_gpus_that_the_flag_leaves_are_those_that_count(root: Path, cpus: list[int]) -> None:
    one_each = placed(root, "-n", "2", "--gpus", "1,0", "--virtual-local-rank", "--numa-binding", "node")
    assert one_each.cpus is not None
    assert one_each.cpus[1] == {cpus[1]}
    assert [one_each.devices.environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["1", "0"]


def test_without_binding_the_usable_cores_are_divided(root: Path, cpus: list[int]) -> None:
    found = placed(root, "-n", "2")
    assert found.cpus is None
    assert list(found.threads) == [max(1, usable_cores() // 2)] * 2
    assert found.notes == []


def test_a_rank_has_as_many_threads_as_cpus_divided_by_their_ranks(root: Path) -> None:
    found = placed(root, "-n", "4", "--numa-binding", "node", "--gpus", "GPU-0,GPU-0-uuid,GPU-1,GPU-1-uuid")
    assert found.threads[:2] == [1, 1]
    assert min(found.threads) >= 1


def test_a_range_of_thread_counts_is_shown_as_one(root: Path) -> None:
    found = placed(root, "-n", "2")
    assert found.threads_text == str(found.threads[0])
    assert Placement(found.devices, [2, 3, 2]).threads_text == "2 to 3"


def test_what_the_host_does_not_have_ends_the_program(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        placed(root, "-n", "3", "--virtual-local-rank")
    assert ended.value.code == 2
    assert "3 ranks need a GPU each, but there are 2 GPUs on this host" in capsys.readouterr().err
