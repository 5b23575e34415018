"""The commands that a newcomer types: listed by make help, and shell scripts that the shell can read."""

from __future__ import annotations

from pathlib import Path

import pytest

import world

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "target", ["demo", "test", "test-all", "test-next-torch", "check", "sanitize", "bench", "develop", "help"]
)
def test_make_help_lists_the_target(target: str) -> None:
    done = world.run_command(["make", "help"], directory=ROOT)
    assert any(line.split()[:2] == ["make", target] for line in done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize("script", [".ci/run", "tools/preflight.sh"])
def test_the_shell_can_read_the_script(script: str) -> None:
    assert world.run_command(["bash", "-n", str(ROOT / script)]).returncode == 0


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_starts_nothing_where_something_is_missing(tmp_path: Path, target: str) -> None:
    command = ["make", target, f"VENV={tmp_path / 'venv'}", "PYTHON=/nowhere/python3", "CXX=/nowhere/c++"]
    done = world.run_command(command, directory=ROOT)
    assert done.returncode != 0
    assert "Python 3.11 or newer is missing" in done.stderr and "A C++ compiler is missing" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_line_with_a_forbidden_word_is_named(tmp_path: Path) -> None:
    room = tmp_path / "src" / "procgroup"
    room.mkdir(parents=True)
    (room / "names.py").write_text("import socket\nname = socket.getfqdn()\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "check_words.py").write_text((ROOT / "tools" / "check_words.py").read_text())
    done = world.run_command(["python3", "tools/check_words.py"], directory=tmp_path)
    assert (done.returncode, done.stdout.split(": ")[:2]) == (1, ["src/procgroup/names.py:2", "getfqdn"])
