"""GPUs: how many this process may use, and which NUMA node is beside each."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.made_up_host import write_gpus
from procgroup.cluster.accelerators import VISIBLE_DEVICES, host_gpus, numa_node, visible_gpus, visible_lists


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VISIBLE_DEVICES:
        monkeypatch.delenv(name, raising=False)


def test_gpus_are_counted_by_their_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus(tmp_path) == 0
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus(tmp_path) == host_gpus(tmp_path) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert visible_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus(tmp_path) == 0


def test_gpus_of_amd_are_those_whose_number_can_be_read(tmp_path: Path) -> None:
    for node, number in enumerate(["0", "51234", "5432"]):
        directory = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        directory.mkdir(parents=True)
        (directory / "gpu_id").write_text(number + "\n")
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/3").mkdir()
    assert host_gpus(tmp_path) == 2


def test_the_entries_of_a_variable_count_up_to_the_first_invalid_one() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "2, GPU-aa,-1,0", "HIP_VISIBLE_DEVICES": "", "OTHER": "1"}
    assert visible_lists(environment) == {"CUDA_VISIBLE_DEVICES": ["2", "GPU-aa"], "HIP_VISIBLE_DEVICES": []}


def test_the_node_beside_a_gpu_is_found_by_number_and_by_uuid(tmp_path: Path) -> None:
    write_gpus(tmp_path, {"0000:17:00.0": 0, "0000:65:00.0": 0, "0000:CA:00.0": 1})
    pci = tmp_path / "sys/bus/pci/devices"
    (pci / "0000:CA:00.0").rename(pci / "0000:ca:00.0")
    assert [numa_node(gpu, tmp_path) for gpu in ("0", "1", "2")] == [0, 0, 1]
    assert numa_node("GPU-2-uuid", tmp_path) == numa_node("GPU-2", tmp_path) == 1


@pytest.mark.parametrize("gpu", ["3", "GPU-9", "MIG-0-uuid"])
def test_the_node_of_another_gpu_is_not_known(tmp_path: Path, gpu: str) -> None:
    write_gpus(tmp_path, {"0000:17:00.0": 0})
    assert numa_node(gpu, tmp_path) is None


def test_the_node_is_not_known_where_the_system_says_minus_one(tmp_path: Path) -> None:
    write_gpus(tmp_path, {"0000:17:00.0": -1})
    assert numa_node("0", tmp_path) is None
