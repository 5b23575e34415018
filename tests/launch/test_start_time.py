"""The time that the launcher adds to a job that does nothing."""

from __future__ import annotations

import time
from typing import Any

from launch.agents import wait_until

HALF_OF_TORCHRUN = 0.65
"""Seconds; docs/guide/launch.md has both launchers' times."""


def test_two_empty_scripts_take_less_than_half_the_time_of_torchrun(launcher: Any) -> None:
    taken: list[float] = []

    def is_quick() -> bool:
        began = time.monotonic()
        assert launcher.run("", "--nproc-per-node", "2").returncode == 0
        taken.append(time.monotonic() - began)
        return taken[-1] < HALF_OF_TORCHRUN

    # Other programs on the machine make single runs slower, not faster.
    wait_until(is_quick, 30, lambda: f"seconds of each run: {taken}")
