"""The main example: it learns, all ranks end with the same parameters, and with those of one rank alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import world

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_digits.py"

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def train(size: int, tmp_path: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    launcher = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", str(size)]
    done = world.run_command(
        [*launcher, str(SCRIPT), *arguments], environment=environment, directory=tmp_path, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(output: str) -> float:
    found = re.search(r"test accuracy (\d\.\d+)", output)
    assert found, output
    return float(found[1])


def test_four_ranks_learn_and_agree_with_one(tmp_path: Path) -> None:
    output = train(4, tmp_path, "--compare-single")
    assert accuracy(output) >= 0.96
    assert "parameters identical on 4 ranks" in output
    assert "largest difference from training on one rank" in output
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])  # over TCP three, to the end four
def test_any_number_of_ranks_reaches_the_same_parameters(tmp_path: Path, size: int) -> None:
    output = train(size, tmp_path, "--epochs", "3", "--compare-single", "--curves", "curves.png")
    assert f"parameters identical on {size} ranks" in output
    assert (tmp_path / "curves.png").exists()


def test_trains_over_tcp_too(tmp_path: Path) -> None:
    output = train(3, tmp_path, "--epochs", "2", "--compare-single", environment={"PROCGROUP_TRANSPORT": "tcp"})
    assert "parameters identical on 3 ranks" in output


def test_the_curve_needs_a_writable_place_and_says_so(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "procgroup", "run"]
    script = [str(SCRIPT), "--epochs", "1", "--curves", str(tmp_path / "missing" / "curves.png")]
    done = world.run_command([*launcher, *script], timeout=250)
    assert done.returncode != 0
    assert "FileNotFoundError" in done.stdout + done.stderr
