"""benchmarks/small_things.py with procgroup alone: every operation gives the right result, and has a row."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from world import run_command

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "small_things.py"


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operation_is_measured(ranks: int) -> None:
    chosen = ["--ranks", str(ranks), "--peers", "procgroup", "--rounds", "1", "--seconds", "0.001"]
    done = run_command([sys.executable, str(BENCHMARK), *chosen], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +\| procgroup +[\d.]+$", done.stdout, re.MULTILINE)
    assert rows == re.findall(r'^    "(\w+)",$', BENCHMARK.read_text(), re.MULTILINE)
