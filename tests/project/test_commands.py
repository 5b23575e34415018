"""The commands that a newcomer types: listed by make help, and shell scripts that the shell can read."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

import world
from procgroup import __main__

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "target", ["demo", "test", "test-all", "test-next-torch", "check", "sanitize", "bench", "develop", "wheels", "help"]
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


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["rum", "-n", "2", "a.py"], "there is no command 'rum'; did you mean 'run'? the commands are: run"),
        (["-n", "2", "a.py"], "there is no command '-n'; did you mean: procgroup run -n 2 a.py"),
        (["a.py", "two words"], "there is no command 'a.py'; did you mean: procgroup run a.py 'two words'"),
        (["xyz"], "there is no command 'xyz'; the commands are: run"),
    ],
)
def test_a_misspelt_command_is_answered_with_what_was_meant(
    typed: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(typed) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("typed", [[], ["help"], ["--help"], ["-h"]])
def test_the_help_lists_the_commands(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(typed) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in __main__.COMMANDS)


@pytest.mark.parametrize("typed", ["--version", "-V"])
def test_the_version_is_the_installed_one(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([typed]) == 0
    assert capsys.readouterr().out.startswith("procgroup ")


def test_python_in_front_of_the_script_is_refused_in_words(tmp_path: Path) -> None:
    done = world.run_command([sys.executable, "-m", "procgroup", "run", "python", "a.py"], directory=tmp_path)
    assert done.returncode == 2
    assert "give the script without python" in done.stderr


@pytest.mark.parametrize("command", ["capabilities", "explain --list", "--help", "run --help"])
def test_a_command_whose_reader_has_ended_ends_without_a_traceback(command: str, tmp_path: Path) -> None:
    line = f"{sys.executable} -m procgroup {command} | true; exit ${{PIPESTATUS[0]}}"
    done = world.run_command(["bash", "-c", f"sleep 0; {line}"], environment={"PROCGROUP_RECORD_DIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
