"""The processor time of a job that does nothing, and what its launcher imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from launch.agents import wait_until
from world import run_command

HALF_OF_TORCHRUN = 0.65
"""Seconds; docs/guide/launch.md has both launchers' times. Here those on a processor count, which are 0.12."""


def seconds_of_children() -> float:
    """Return the processor time of all children that have ended, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


def test_two_empty_scripts_take_less_than_half_the_time_of_torchrun(launcher: Any) -> None:
    taken: list[float] = []

    def is_quick() -> bool:
        before = seconds_of_children()
        assert launcher.run("", "--nproc-per-node", "2").returncode == 0
        taken.append(seconds_of_children() - before)
        return taken[-1] < HALF_OF_TORCHRUN

    # Other programs on the machine make single runs slower, not faster.
    wait_until(is_quick, 30, lambda: f"seconds of each run: {taken}")


ONE_NODE = """
import sys
from procgroup.launch import run
options = run.flags.parse("procgroup run", ["--nproc-per-node", "2", sys.argv[1]])
status = run.launch(options, [])
slow = ["dataclasses", "inspect", "http", "ssl", "ctypes", "asyncio", "numpy"]
slow += ["procgroup.launch.nodes", "procgroup.stores"]
print("imported", [name for name in slow if name in sys.modules], "status", status)
"""


def test_the_launcher_of_a_job_with_one_node_imports_no_module_that_is_slow_to_import_and_not_needed(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty.py").touch()
    done = run_command([sys.executable, "-c", ONE_NODE, str(tmp_path / "empty.py")])
    assert "imported [] status" in done.stdout, done.stdout + done.stderr


def test_the_launcher_of_a_job_with_one_node_imports_at_most_30_modules_of_procgroup(tmp_path: Path) -> None:
    (tmp_path / "empty.py").touch()
    command = [sys.executable, "-X", "importtime", "-m", "procgroup", "run", "-n", "2", str(tmp_path / "empty.py")]
    done = run_command(command)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    imported = sorted(name for name in names if name.partition(".")[0] == "procgroup")
    assert done.returncode == 0
    assert 20 < len(imported) <= 30, imported
