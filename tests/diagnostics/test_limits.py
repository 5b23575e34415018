"""Limits: open files, locked memory, processes, and the queue of connections."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from diagnostics.made_up_system import one, texts, write, write_group
from procgroup.diagnostics.doctor import limits
from procgroup.diagnostics.doctor.findings import Finding, Level

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def limited(
    files: int = 65536, most: int = 65536, locked: int = -1, processes: int = -1
) -> Callable[[int], tuple[int, int]]:
    values = {
        resource.RLIMIT_NOFILE: (files, most),
        resource.RLIMIT_MEMLOCK: (locked, locked),
        resource.RLIMIT_NPROC: (processes, processes),
    }
    return lambda number: values[number]


def check(root: Path, world_size: int = 2, limit_of: Callable[[int], tuple[int, int]] | None = None) -> list[Finding]:
    return list(limits.check(world_size, root, limit_of or limited()))


def test_ample_limits_are_fine(tmp_path: Path) -> None:
    assert {finding.level for finding in check(tmp_path)} == {Level.OK}


def test_unlimited_is_fine(tmp_path: Path) -> None:
    assert {finding.level for finding in check(tmp_path, limit_of=lambda _: UNLIMITED)} == {Level.OK}


def test_few_open_files_are_a_warning(tmp_path: Path) -> None:
    found = one(check(tmp_path, limit_of=limited(files=256)), Level.WARNING)
    assert found.text == "256 open files are allowed, enough for some 64 ranks"
    assert found.advice == "Raise the limit: ulimit -n 1024"


def test_fewer_open_files_than_the_job_needs_are_a_problem(tmp_path: Path) -> None:
    found = one(check(tmp_path, world_size=1000, limit_of=limited(files=1024, most=2048)), Level.PROBLEM)
    assert found.text == "1024 open files are allowed, and 1000 ranks need 3064"
    assert "root has to raise the hard limit of 2048 first" in found.advice


def test_little_locked_memory_matters_only_with_infiniband(tmp_path: Path) -> None:
    assert "64 KiB of memory may be locked" in one(check(tmp_path, limit_of=limited(locked=65536)), Level.NOTE).text
    write(tmp_path, "sys/class/infiniband/mlx5_0/node_type", "1: CA")
    found = one(check(tmp_path, limit_of=limited(locked=65536)), Level.WARNING)
    assert "mlx5_0" in found.text and "ulimit -l unlimited" in found.advice


@pytest.mark.parametrize(("used", "level"), [(300, Level.OK), (900, Level.WARNING), (1020, Level.PROBLEM)])
def test_the_processes_that_a_control_group_still_allows_count(tmp_path: Path, used: int, level: Level) -> None:
    write_group(tmp_path, 1, "pids", {"pids.max": "1024", "pids.current": str(used)})
    assert any(f"{1024 - used} more" in text for text in texts(check(tmp_path), level))


def test_the_limit_of_a_user_s_processes_does_not_hold_for_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert not texts(check(tmp_path, limit_of=limited(processes=100)), Level.WARNING)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "100 processes" in one(check(tmp_path, limit_of=limited(processes=100)), Level.WARNING).text


def test_a_short_queue_of_connections_is_a_warning_for_large_jobs(tmp_path: Path) -> None:
    write(tmp_path, "proc/sys/net/core/somaxconn", "128")
    assert not texts(check(tmp_path), Level.WARNING)
    assert "128 connections" in one(check(tmp_path, world_size=512), Level.WARNING).text
