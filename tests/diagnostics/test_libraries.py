"""GPUs, NCCL and MPI: what is there is shown, and what is not there matters only beside GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpi_world
from cluster.made_up_host import write_gpus
from diagnostics.made_up_system import one, texts, write
from procgroup.diagnostics.doctor import gpus, mpi, shared_libraries
from procgroup.diagnostics.doctor.findings import Finding, Level

LIBRARIES = "usr/lib/x86_64-linux-gnu"
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025"


def version_of_library(kind: str, file: Path) -> str:
    return f"{kind} of {file.name}"


def check_gpus(root: Path, **environment: str) -> list[Finding]:
    return list(gpus.check(environment, root, version_of_library))


def write_host_with_gpus(root: Path) -> None:
    write_gpus(root, {"0000:01:00.0": 0, "0000:02:00.0": 1})
    write(root, "proc/driver/nvidia/version", DRIVER)
    write(root, f"{LIBRARIES}/libcuda.so.1", "")


def test_without_gpus_everything_is_a_note(tmp_path: Path) -> None:
    assert {finding.level for finding in check_gpus(tmp_path)} == {Level.NOTE}


def test_gpus_with_driver_and_nccl_are_fine(tmp_path: Path) -> None:
    write_host_with_gpus(tmp_path)
    write(tmp_path, f"{LIBRARIES}/libnccl.so.2", "")
    found = check_gpus(tmp_path)
    assert {finding.level for finding in found} == {Level.OK}
    assert "2 GPUs: 2 x X" in texts(found, Level.OK) and "driver 580.95.05" in texts(found, Level.OK)
    assert any(text.startswith("NCCL nccl of libnccl.so.2 at ") for text in texts(found, Level.OK))


def test_gpus_without_nccl_are_a_warning(tmp_path: Path) -> None:
    write_host_with_gpus(tmp_path)
    found = one(check_gpus(tmp_path), Level.WARNING)
    assert "host memory" in found.text and "procgroup[nccl-cu13]" in found.advice


def test_gpus_without_the_driver_s_library_are_a_problem(tmp_path: Path) -> None:
    write_host_with_gpus(tmp_path)
    (tmp_path / LIBRARIES / "libcuda.so.1").unlink()
    assert "--gpus all" in one(check_gpus(tmp_path), Level.PROBLEM).advice


def test_a_gpu_that_does_not_exist_is_a_warning(tmp_path: Path) -> None:
    write_host_with_gpus(tmp_path)
    found = check_gpus(tmp_path, CUDA_VISIBLE_DEVICES="0,5")
    assert any("names GPU 5, but there are 2" in text for text in texts(found, Level.WARNING))


def check_mpi(root: Path, mpi4py: str = "", **environment: str) -> list[Finding]:
    return list(mpi.check({"PATH": "", **environment}, root, lambda _: mpi4py, version_of_library))


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
