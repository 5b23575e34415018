"""Processors: affinity, quotas of control groups, hyper-threads, and values of OMP_NUM_THREADS."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.made_up_host import server, write_topology
from diagnostics.made_up_system import one, texts, write, write_group
from procgroup.cluster.topology import SYSTEM
from procgroup.diagnostics.doctor import limits
from procgroup.diagnostics.doctor.findings import Finding, Level

FOUR = frozenset(range(4))


def check(root: Path, usable: frozenset[int] = FOUR, **environment: str) -> list[Finding]:
    return list(limits.check_processors(environment, root, usable))


def test_an_affinity_that_leaves_cpus_out_is_shown(tmp_path: Path) -> None:
    write(tmp_path, f"{SYSTEM}/cpu/online", "0-63")
    assert "4 of 64 CPUs are usable, by affinity (0-3)" in texts(check(tmp_path), Level.OK)


def test_hyper_threads_are_counted_as_parts_of_a_core(tmp_path: Path) -> None:
    write_topology(tmp_path, server())
    found = check(tmp_path, usable=frozenset(range(32)))
    assert one(found, Level.NOTE).text.startswith("32 CPUs are 16 cores with hyper-threads")


@pytest.mark.parametrize(
    ("version", "files"),
    [(2, {"cpu.max": "250000 100000"}), (1, {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"})],
)
def test_a_quota_of_either_version_says_how_many_ranks_run_at_full_speed(
    tmp_path: Path, version: int, files: dict[str, str]
) -> None:
    write_group(tmp_path, version, "cpu", files)
    assert one(check(tmp_path), Level.NOTE).text == (
        "the control group's quota is 2.5 CPUs: 2 ranks that are always busy can run at full speed"
    )


def test_a_quota_below_one_cpu_is_a_warning(tmp_path: Path) -> None:
    write_group(tmp_path, 2, "cpu", {"cpu.max": "50000 100000"})
    assert "limits.cpu" in one(check(tmp_path), Level.WARNING).advice


def test_a_quota_above_the_affinity_changes_nothing(tmp_path: Path) -> None:
    write_group(tmp_path, 2, "cpu", {"cpu.max": "800000 100000"})
    assert {finding.level for finding in check(tmp_path)} == {Level.OK}


@pytest.mark.parametrize(("load", "level"), [("3.9", Level.OK), ("4.1", Level.NOTE)])
def test_other_programs_that_run_are_noted(tmp_path: Path, load: str, level: Level) -> None:
    write(tmp_path, "proc/loadavg", f"{load} 0.50 0.25 5/300 12345")
    assert max(check(tmp_path), key=lambda finding: finding.level is Level.NOTE).level is level


@pytest.mark.parametrize("text", ["0", "-1", "four", "2,0", "2.5"])
def test_no_number_of_threads_is_a_warning(tmp_path: Path, text: str) -> None:
    found = one(check(tmp_path, OMP_NUM_THREADS=text), Level.WARNING)
    assert f"OMP_NUM_THREADS={text!r}" in found.text


@pytest.mark.parametrize(
    ("environment", "advised"),
    [
        ({"OMP_NUM_THREADS": "64"}, "set it to 4"),
        ({"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "2"}, "set it to 2"),
        ({"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "8"}, "set it to 1"),
    ],
)
def test_more_threads_than_cpus_are_a_warning(tmp_path: Path, environment: dict[str, str], advised: str) -> None:
    assert one(check(tmp_path, **environment), Level.WARNING).advice.endswith(advised)


def test_the_quota_bounds_the_threads_too(tmp_path: Path) -> None:
    write_group(tmp_path, 2, "cpu", {"cpu.max": "200000 100000"})
    assert "but 2 CPUs are usable" in one(check(tmp_path, OMP_NUM_THREADS="4"), Level.WARNING).text


@pytest.mark.parametrize("environment", [{}, {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "2,1"}])
def test_fitting_threads_are_fine(tmp_path: Path, environment: dict[str, str]) -> None:
    assert {finding.level for finding in check(tmp_path, **environment)} == {Level.OK}
