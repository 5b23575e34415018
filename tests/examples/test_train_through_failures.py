"""The example that goes on when a rank dies: in a smaller group, and with a new process in its place."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import world

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_through_failures.py"

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("go_on", "flags", "ranks", "limit"),
    [("shrink", ["--keep-going"], 3, 10.0), ("replace", ["--replace", "--max-restarts", "3"], 4, 50.0)],
)
def test_the_others_make_the_next_step_in_time_and_end_as_if_nobody_had_died(
    tmp_path: Path, go_on: str, flags: list[str], ranks: int, limit: float
) -> None:
    launcher = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", "4", *flags, str(SCRIPT)]
    done = world.run_command([*launcher, "--go-on", go_on, "--curves", "losses.png"], directory=tmp_path, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"lost rank 2; {ranks} ranks made step 101 (\d+\.\d+) s later", done.stdout)
    assert found and float(found[1]) < limit, done.stdout
    difference = re.search(r"from an undisturbed run: (\S+)", done.stdout)
    assert difference and float(difference[1]) < 1e-12, done.stdout
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
