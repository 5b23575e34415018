"""The example with a DataLoader goes on in the middle of an epoch when a rank dies, and continues from a checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import world

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_through_epochs.py"

pytestmark = pytest.mark.torch


def train(directory: Path, ranks: int, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Return what the ranks print, without the losses."""
    launcher = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", str(ranks), *flags, str(SCRIPT)]
    done = world.run_command([*launcher, *arguments], directory=directory, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r" loss \d+\.\d+,", "", done.stdout).splitlines()


def test_a_new_process_begins_in_the_middle_of_the_epoch(tmp_path: Path) -> None:
    shown = train(tmp_path, 3, "--go-on", "replace", flags=("--replace", "--max-restarts", "3"))
    assert [line for line in shown if "rank 0" in line] == [f"[rank 0] epoch {epoch}: 3 ranks" for epoch in range(4)]
    # Dead in its sixth batch of 8 samples, which the two others complete: 6 of each of the 3 ranks have been used.
    assert "[rank 1] this process began in epoch 1, at sample 144" in shown


def test_a_smaller_group_divides_what_remains_of_the_epoch(tmp_path: Path) -> None:
    shown = train(tmp_path, 3, "--go-on", "shrink", flags=("--keep-going",))
    sizes = [3, 2, 2, 2]
    assert shown == [f"[rank 0] epoch {epoch}: {size} ranks" for epoch, size in enumerate(sizes)]


@pytest.mark.slow
def test_a_later_run_continues_from_the_checkpoint_with_any_number_of_ranks(tmp_path: Path) -> None:
    assert train(tmp_path, 2, "--nobody-dies", "--epochs", "2") == [
        "[rank 0] epoch 0: 2 ranks",
        "[rank 0] epoch 1: 2 ranks",
    ]
    assert train(tmp_path, 3, "--nobody-dies", "--epochs", "3") == ["[rank 0] epoch 2: 3 ranks"]
