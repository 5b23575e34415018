"""A test that hangs is ended by its time limit, and the stacks of all its threads are shown."""

from __future__ import annotations

import sys
from pathlib import Path

import world

ROOT = Path(__file__).resolve().parents[2]

HANGING = """
import threading, time, pytest

def wait_in_a_thread():
    time.sleep(60)

@pytest.mark.timeout(1)
def test_hangs():
    threading.Thread(target=wait_in_a_thread, daemon=True).start()
    time.sleep(60)
"""

LEAVING = """
import subprocess

def test_leaves_a_process_behind():
    subprocess.Popen(["sleep", "60"])
"""


def run_pytest(tmp_path: Path, text: str) -> str:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(text)
    done = world.run_command(
        [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)],
        directory=tmp_path,
        timeout=30,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_hanging_test_fails_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, HANGING)
    assert "Failed: Timeout" in output
    assert "in wait_in_a_thread" in output


def test_a_test_that_leaves_a_process_behind_fails(tmp_path: Path) -> None:
    assert "the test left these running" in run_pytest(tmp_path, LEAVING)
