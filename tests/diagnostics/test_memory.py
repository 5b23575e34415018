"""Memory: arenas, /dev/shm, limits of control groups, and single copies between processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from diagnostics.made_up_system import one, texts, write, write_group
from procgroup.diagnostics.doctor import memory, single_copy
from procgroup.diagnostics.doctor.findings import Finding, Level
from procgroup.diagnostics.doctor.memory import Space

MIB, GIB = 1 << 20, 1 << 30
AMPLE = Space(16 * GIB, 15 * GIB)


def nothing() -> str:
    return ""


def check(
    root: Path, arena: Callable[[], str] = nothing, shm: Space | None = AMPLE, copy: Callable[[], str] = nothing
) -> list[Finding]:
    write(root, "proc/meminfo", "MemTotal: 65536000 kB\nMemAvailable: 33554432 kB")
    return list(memory.check(root, arena, lambda _: shm, copy))


def test_enough_of_everything_is_fine(tmp_path: Path) -> None:
    assert {finding.level for finding in check(tmp_path)} == {Level.OK}


def test_an_arena_that_cannot_be_made_is_a_warning_with_the_reason(tmp_path: Path) -> None:
    found = one(check(tmp_path, arena=lambda: "creating an arena: Function not implemented"), Level.WARNING)
    assert "Function not implemented" in found.text and "TCP" in found.text


def test_an_arena_can_be_made_here() -> None:
    assert memory.try_arena() == ""


@pytest.mark.parametrize("space", [Space(64 * MIB, 64 * MIB), Space(8 * GIB, 100 * MIB)])
def test_a_small_or_full_dev_shm_is_a_warning(tmp_path: Path, space: Space) -> None:
    found = one(check(tmp_path, shm=space), Level.WARNING)
    assert memory.show_bytes(space.size) in found.text and "--shm-size" in found.advice


def test_a_missing_dev_shm_is_a_warning(tmp_path: Path) -> None:
    assert memory.space_of(tmp_path / "dev/shm") is None
    assert "there is no /dev/shm" in one(check(tmp_path, shm=None), Level.WARNING).text


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (
            2,
            {
                "memory.max": str(GIB),
                "memory.current": str(GIB - 200 * MIB),
                "memory.stat": f"inactive_file {50 * MIB}",
            },
        ),
        (
            1,
            {
                "memory.limit_in_bytes": str(GIB),
                "memory.usage_in_bytes": str(GIB - 200 * MIB),
                "memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}",
            },
        ),
    ],
)
def test_the_memory_that_a_control_group_leaves_counts_without_cached_files(
    tmp_path: Path, version: int, files: dict[str, str]
) -> None:
    write_group(tmp_path, version, "memory", files)
    assert one(check(tmp_path), Level.WARNING).text.startswith("only 250 MiB of memory are available")


def test_a_full_control_group_is_a_problem(tmp_path: Path) -> None:
    write_group(tmp_path, 2, "memory", {"memory.max": str(GIB), "memory.current": str(GIB - MIB)})
    assert "control group: shared memory cannot be reserved" in one(check(tmp_path), Level.PROBLEM).text


def test_a_control_group_without_limit_leaves_what_the_host_has(tmp_path: Path) -> None:
    write_group(tmp_path, 2, "memory", {"memory.max": "max", "memory.current": str(GIB)})
    assert "32 GiB of memory are available to this process, by its host" in texts(check(tmp_path), Level.OK)


def test_the_outer_group_s_limit_counts(tmp_path: Path) -> None:
    write_group(tmp_path, 2, "memory", {"memory.max": "max", "memory.current": "0"}, group="outer/inner")
    write(tmp_path, "cgroup/outer/memory.max", str(GIB))
    write(tmp_path, "cgroup/outer/memory.current", str(GIB - 100 * MIB))
    assert one(check(tmp_path), Level.WARNING).text.startswith("only 100 MiB")


def test_refused_single_copies_are_explained_by_ptrace_scope(tmp_path: Path) -> None:
    write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", "1")
    found = one(check(tmp_path, copy=lambda: "Operation not permitted"), Level.WARNING)
    assert "Operation not permitted" in found.text and "ptrace_scope is 1" in found.text
    assert found.advice == "Allow it: sysctl kernel.yama.ptrace_scope=0"


def test_refused_single_copies_are_explained_by_filtered_system_calls(tmp_path: Path) -> None:
    write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", "0")
    write(tmp_path, "proc/self/status", "Name:\tpython\nSeccomp:\t2")
    found = one(check(tmp_path, copy=lambda: "Operation not permitted"), Level.WARNING)
    assert "system calls are filtered" in found.text and "--cap-add=SYS_PTRACE" in found.advice


def test_the_kernel_is_asked_by_two_processes() -> None:
    reason = single_copy.problem()
    assert reason in ("", "Operation not permitted", "Function not implemented"), reason


def test_a_process_that_cannot_be_started_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_copy, "_PYTHON", ("/nowhere/python",))
    assert single_copy.problem().startswith("it could not be tried: ")
