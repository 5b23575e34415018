"""The JAX example: it learns, and all ranks end with the same parameters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import world

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_jax.py"

pytest.importorskip("jax")
pytest.importorskip("sklearn")


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_all_ranks_learn_the_same(tmp_path: Path, size: int) -> None:
    command = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", str(size), str(SCRIPT), "--epochs", "8"]
    done = world.run_command(command, directory=tmp_path, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"rank (\d) of \d: parameters ([0-9a-f]{16}), test accuracy (\d\.\d+)", done.stdout)
    assert sorted(rank for rank, _, _ in found) == [str(rank) for rank in range(size)]
    assert len({digest for _, digest, _ in found}) == 1
    assert all(float(accuracy) >= 0.93 for _, _, accuracy in found), done.stdout
