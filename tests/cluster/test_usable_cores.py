"""Usable cores: the smallest of existing cores, affinity and control-group quota."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from procgroup.cluster.control_group import OutOfMemoryKills, directories, quota_of, usable_cores
from world import run_command

SHOW = "from procgroup.cluster.control_group import usable_cores; print(usable_cores())"


def test_at_least_one_and_no_more_than_exist() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_affinity_of_a_process_is_its_own() -> None:
    cores = sorted(os.sched_getaffinity(0))
    source = f"import os; os.sched_setaffinity(0, [{cores[0]}]); {SHOW}"
    assert run_command([sys.executable, "-c", source]).stdout == "1\n"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("150000 100000", 1.5), ("10000 100000", 0.1), ("rubbish", None), ("", None)],
)
def test_quota_of_version_2(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert quota_of([tmp_path]) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("250000", 2.5), ("0", None), ("x", None)])
def test_quota_of_version_1(tmp_path: Path, quota: str, cores: float | None) -> None:
    (tmp_path / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_of([tmp_path]) == cores


def test_the_smallest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path
    inner.mkdir()
    (inner / "cpu.max").write_text("400000 100000")
    (outer / "cpu.max").write_text("200000 100000")
    assert quota_of([inner, outer, tmp_path / "missing"]) == 2.0


def process(tmp_path: Path, cgroup: str, mountinfo: str) -> Path:
    (tmp_path / "cgroup").write_text(cgroup)
    (tmp_path / "mountinfo").write_text(mountinfo)
    return tmp_path


V1 = "32 31 0:29 / /cg/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "41 31 0:38 / /cg/unified rw - cgroup2 cgroup2 rw\n"


def test_version_1_gives_the_controller_s_own_hierarchy(tmp_path: Path) -> None:
    found = directories("cpu", process(tmp_path, "4:cpu,cpuacct:/a/b\n0::/x\n", V2 + V1))
    assert found == [Path("/cg/cpu/a/b"), Path("/cg/cpu/a"), Path("/cg/cpu")]


def test_version_2_gives_the_one_hierarchy(tmp_path: Path) -> None:
    assert directories("cpu", process(tmp_path, "0::/a\n", V2)) == [Path("/cg/unified/a"), Path("/cg/unified")]


def test_a_container_that_sees_only_its_own_part_is_understood(tmp_path: Path) -> None:
    mount = "32 31 0:29 /docker/17 /cg/cpu rw - cgroup cgroup rw,cpu\n"
    assert directories("cpu", process(tmp_path, "4:cpu:/docker/17/in\n", mount)) == [
        Path("/cg/cpu/in"),
        Path("/cg/cpu"),
    ]
    assert directories("cpu", process(tmp_path, "4:cpu:/elsewhere\n", mount)) == [Path("/cg/cpu")]


def test_no_control_groups_mean_no_directories(tmp_path: Path) -> None:
    assert directories("cpu", tmp_path / "nothing") == []
    assert directories("cpu", process(tmp_path, "", "")) == []


@pytest.fixture
def quota_group() -> Iterator[Path]:
    """Make a real control group with a quota of one and a half cores."""
    found = directories("cpu")
    if not found or not (found[-1] / "cpu.cfs_quota_us").parent.is_dir() or not os.access(found[-1], os.W_OK):
        pytest.skip("this process may not make control groups here")
    group = found[-1] / f"procgroup-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("150000")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a quota can be made here: {error}")
    yield group
    group.rmdir()


def test_a_real_quota_is_seen_from_inside(quota_group: Path) -> None:
    source = f"import os; open('{quota_group}/cgroup.procs', 'w').write(str(os.getpid())); {SHOW}"
    assert run_command([sys.executable, "-c", source]).stdout == "1\n"


def test_out_of_memory_kills_are_counted_from_a_moment_on() -> None:
    before = OutOfMemoryKills.so_far()
    assert (before.host or 0) >= 0
    assert OutOfMemoryKills(3, 5).since(OutOfMemoryKills(1, 5)) == OutOfMemoryKills(2, 0)
    assert OutOfMemoryKills(3, None).since(OutOfMemoryKills(None, 5)) == OutOfMemoryKills(None, None)
