"""Training that was interrupted, and went on with other numbers of ranks, ends where an uninterrupted one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import world

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "resume_training.py"

pytest.importorskip("sklearn")


def train(size: int, checkpoint: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", str(size)]
    script = [str(SCRIPT), "--checkpoint", str(checkpoint), "--epochs", "3", "--every", "3", *arguments]
    return world.run_command([*launcher, *script], timeout=250)


def test_restarts_change_nothing_in_the_result(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.npz", tmp_path / "parts.npz"
    assert train(1, whole).returncode == 0
    for size, steps, goes_on in [(3, "20", ""), (1, "10", "epoch 1 after 720"), (2, "-1", "epoch 2 after 360")]:
        done = train(size, parts, "--stop-after", steps)
        assert (done.returncode == 0) == (steps == "-1"), done.stdout + done.stderr
        assert goes_on in done.stdout
    assert "test accuracy 0.8" in done.stdout or "test accuracy 0.9" in done.stdout
    with np.load(whole) as expected, np.load(parts) as found:
        assert sorted(expected.files) == sorted(found.files)
        assert str(expected["sampler"]) == str(found["sampler"])
        for name in set(expected.files) - {"sampler"}:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)
    assert not list(tmp_path.glob("*.partial"))


def test_a_number_of_ranks_that_does_not_divide_the_batch_is_refused(tmp_path: Path) -> None:
    done = train(7, tmp_path / "digits.npz")
    assert done.returncode != 0 and "expected a number of ranks that divides 120, got 7" in done.stdout + done.stderr
