"""GPUs, NCCL and MPI: what is there is shown, and what is not there matters only beside GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpi_world
from cluster.made_up_host import write_gpus
from diagnostics.made_up_system import one, texts, write
from procgroup.diagnostics.doctor import gpus as doctor_gpus
from procgroup.diagnostics.doctor import shared_libraries, software
from procgroup.diagnostics.doctor.findings import Finding, Level
from procgroup.diagnostics.doctor.shared_libraries import GpuDescription, GpuDriver

LIBRARIES = "usr/lib/x86_64-linux-gnu"
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025"


def version_of_library(kind: str, file: Path) -> str:
    return f"{kind} of {file.name}"


TWO = GpuDriver("13.0", [GpuDescription("X", True, [1]), GpuDescription("X", True, [0])])


def check_gpus(root: Path, described: GpuDriver = TWO, **environment: str) -> list[Finding]:
    return list(doctor_gpus.check(environment, root, version_of_library, lambda: described))


def write_host_with_gpus(root: Path) -> None:
    write_gpus(root, {"0000:01:00.0": 0, "0000:02:00.0": 1})
    write(root, "proc/driver/nvidia/version", DRIVER)
    write(root, f"{LIBRARIES}/libcuda.so.1", "")


def test_without_gpus_there_is_one_note(tmp_path: Path) -> None:
    assert one(check_gpus(tmp_path), Level.NOTE).text == "no GPU is visible to this process"
    write(tmp_path, f"{LIBRARIES}/libcuda.so.1", "")
    no_device = GpuDriver("", (), "CUDA: CUDA_ERROR_NO_DEVICE (100)")
    assert [finding.level for finding in check_gpus(tmp_path, no_device)] == [Level.NOTE]


def test_gpus_with_driver_and_nccl_are_fine(tmp_path: Path) -> None:
    write_host_with_gpus(tmp_path)
    write(tmp_path, f"{LIBRARIES}/libnccl.so.2", "")
    found = check_gpus(tmp_path, NCCL_SOCKET_IFNAME="lo")
    assert {finding.level for finding in found} == {Level.OK}
    assert "2 GPUs: 2 x X" in texts(found, Level.OK) and "driver 580.95.05" in texts(found, Level.OK)
    assert any(text.startswith("NCCL nccl of libnccl.so.2 at ") for text in texts(found, Level.OK))


def test_gpus_without_nccl_are_a_warning(tmp_path: Path) -> None:
    write_host_with_gpus(tmp_path)
    found = one(check_gpus(tmp_path), Level.WARNING)
    assert "host memory" in found.text and "pip install nvidia-nccl-cu13" in found.advice


def test_gpus_without_the_driver_s_library_are_a_problem(tmp_path: Path) -> None:
    write_host_with_gpus(tmp_path)
    (tmp_path / LIBRARIES / "libcuda.so.1").unlink()
    assert "--gpus all" in one(check_gpus(tmp_path), Level.PROBLEM).advice


def test_a_gpu_that_does_not_exist_is_a_warning(tmp_path: Path) -> None:
    write_host_with_gpus(tmp_path)
    found = check_gpus(tmp_path, CUDA_VISIBLE_DEVICES="0,5")
    assert any("names GPU 5, but there are 2" in text for text in texts(found, Level.WARNING))


def describe(gpus_of: list[GpuDescription], root: Path, **environment: str) -> list[Finding]:
    write_host_with_gpus(root)
    write(root, f"{LIBRARIES}/libnccl.so.2", "")
    return check_gpus(root, GpuDriver("13.0", gpus_of), **environment)


def test_the_driver_s_gpus_are_shown_with_gates_and_peers(tmp_path: Path) -> None:
    shown = texts(describe([GpuDescription("H", True, [1]), GpuDescription("H", True, [0])], tmp_path), Level.OK)
    assert "CUDA 13.0: this process may use 2 GPUs, 2 x H" in shown
    assert any("behind gates" in text for text in shown) and "all of them reach each other's memory" in shown


def test_what_gpus_lack_is_a_note_that_names_them(tmp_path: Path) -> None:
    found = describe(
        [GpuDescription("H", True, [1]), GpuDescription("H", False, [0]), GpuDescription("L", True, [])], tmp_path
    )
    notes = "\n".join(texts(found, Level.NOTE))
    assert "no stream memory operations on GPU 1:" in notes and "through the host: 0 and 2, 1 and 2" in notes
    found = describe([GpuDescription("H", True, [])], tmp_path, PROCGROUP_NCCL_GATE="0")
    assert any(text.startswith("PROCGROUP_NCCL_GATE=0") for text in texts(found, Level.NOTE))


def test_a_driver_that_does_not_work_is_a_problem(tmp_path: Path) -> None:
    write_host_with_gpus(tmp_path)
    found = one(check_gpus(tmp_path, GpuDriver("", (), "CUDA: CUDA_ERROR_SYSTEM_NOT_READY (802)")), Level.PROBLEM)
    assert "SYSTEM_NOT_READY" in found.text and "nvidia-smi" in found.advice


INTERFACES = ("lo", "eth0", "eth10", "docker0")


def check_variables(root: Path, gpus: int = 4, **environment: str) -> list[Finding]:
    return list(doctor_gpus.check_variables(gpus, environment, root, INTERFACES))


@pytest.mark.parametrize(
    ("value", "chosen"),
    [("eth", "eth0, eth10"), ("=eth0", "eth0"), ("^lo,docker", "eth0, eth10"), ("wlan,eth1", "eth10")],
)
def test_the_interfaces_that_nccl_may_use_are_shown(tmp_path: Path, value: str, chosen: str) -> None:
    assert texts(check_variables(tmp_path, NCCL_SOCKET_IFNAME=value), Level.OK) == [
        f"NCCL_SOCKET_IFNAME={value}: NCCL uses {chosen}"
    ]


@pytest.mark.parametrize("value", ["ib0", "=eth1", "^eth,lo,docker"])
def test_an_interface_that_does_not_exist_is_a_problem(tmp_path: Path, value: str) -> None:
    found = one(check_variables(tmp_path, NCCL_SOCKET_IFNAME=value), Level.PROBLEM)
    assert value in found.text and "eth10" in found.text


def test_variables_that_slow_nccl_down_are_warnings(tmp_path: Path) -> None:
    switches = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    assert len(texts(check_variables(tmp_path, **switches), Level.WARNING)) == 2
    write(tmp_path, "sys/class/infiniband/mlx5_0/name", "")
    assert "mlx5_0" in "".join(texts(check_variables(tmp_path, **switches), Level.WARNING))
    assert not texts(check_variables(tmp_path, **dict.fromkeys(switches, "0")), Level.WARNING)


def test_more_ranks_than_gpus_are_a_warning_unless_that_may_be_so(tmp_path: Path) -> None:
    found = one(check_variables(tmp_path, gpus=2, LOCAL_WORLD_SIZE="3"), Level.WARNING)
    assert "3 ranks" in found.text and "2 GPUs" in found.text and "NCCL_MULTI_RANK_GPU_ENABLE" in found.advice
    for allowed in ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, {"CUDA_VISIBLE_DEVICES": "3"}):
        assert not texts(check_variables(tmp_path, gpus=1, LOCAL_WORLD_SIZE="3", **allowed), Level.WARNING)
    assert not texts(check_variables(tmp_path, gpus=3, LOCAL_WORLD_SIZE="3"), Level.WARNING)


def check_mpi(root: Path, mpi4py: str = "", **environment: str) -> list[Finding]:
    return list(software.check_mpi({"PATH": "", **environment}, root, lambda _: mpi4py, version_of_library))


def test_without_mpi_there_is_a_note(tmp_path: Path) -> None:
    assert one(check_mpi(tmp_path), Level.NOTE).text == "no MPI library is found"
    assert "pip install mpich" in one(check_mpi(tmp_path, mpi4py="4.1"), Level.NOTE).text


def test_two_links_to_one_library_count_once(tmp_path: Path) -> None:
    write(tmp_path, f"{LIBRARIES}/libmpi.so.40.30.4", "")
    (tmp_path / LIBRARIES / "libmpi.so.40").symlink_to("libmpi.so.40.30.4")
    assert texts(check_mpi(tmp_path, mpi4py="4.1"), Level.OK)[0].startswith("mpi of libmpi.so.40 at ")


def test_several_mpi_libraries_are_a_warning_for_mpi4py(tmp_path: Path) -> None:
    write(tmp_path, f"{LIBRARIES}/libmpi.so.40", "")
    write(tmp_path, f"{LIBRARIES}/libmpich.so.12", "")
    assert not texts(check_mpi(tmp_path), Level.WARNING)
    assert "2 MPI libraries" in one(check_mpi(tmp_path, mpi4py="4.1"), Level.WARNING).text


def test_libraries_are_found_by_ld_library_path(tmp_path: Path) -> None:
    write(tmp_path, "elsewhere/libmpi.so.12", "")
    assert shared_libraries.find(["libmpi.so*"], {"LD_LIBRARY_PATH": f":{tmp_path / 'elsewhere'}"}, tmp_path) == [
        tmp_path / "elsewhere/libmpi.so.12"
    ]


def test_a_file_that_is_no_library_says_why_it_has_no_version(tmp_path: Path) -> None:
    write(tmp_path, "libmpi.so.12", "text")
    assert shared_libraries.version("mpi", tmp_path / "libmpi.so.12").startswith("(no version: ")


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_an_mpi_library_gives_its_version(name: str) -> None:
    if lack := mpi_world.lacks(name):
        pytest.skip(lack)
    directory = Path(mpi_world.mpiexec(name, 1)[0]).resolve().parents[1] / "lib"
    (file,) = {path.resolve() for path in directory.glob("libmpi.so.*[0-9]")}
    version = shared_libraries.version("mpi", file)
    assert version.startswith({"mpich": "MPICH", "openmpi": "Open MPI"}[name]), version
