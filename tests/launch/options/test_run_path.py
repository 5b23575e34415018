"""--run-path: a script, a folder or a zip file, in the launcher's own interpreter."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from world import run_command

SHOW = "import sys, beside; print(__name__, sys.argv, beside.WORD, sys.path[0])"


def run_path(*arguments: str | Path, environment: dict[str, str] | None = None) -> Any:
    line = [sys.executable, "-m", "procgroup", "run", "--run-path", *map(str, arguments)]
    return run_command(line, environment=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "__main__.py").write_text(SHOW)
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    return tmp_path


def test_a_script_runs_with_its_arguments_and_its_folder_first(folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(SHOW)
    done = run_path(script, "--epochs", "3")
    assert done.stdout == f"[rank 0] __main__ {[str(script), '--epochs', '3']} found {folder}\n", done.stderr


def test_a_folder_and_a_zip_file_run_their_main_module(folder: Path) -> None:
    archive = folder / "program.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("__main__.py", "beside.py"):
            file.write(folder / name, name)
    for path in (folder, archive):
        done = run_path(path, "x")
        assert done.stdout == f"[rank 0] __main__ {[str(path), 'x']} found {path}\n", done.stderr


def test_a_traceback_has_the_script_s_frames_only(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def step():\n    raise ValueError('boom')\nstep()\n")
    done = run_path(script)
    assert done.returncode == 1
    shown = [line for line in done.stderr.splitlines() if "File " in line]
    assert shown
    assert all(str(script) in line for line in shown)


@pytest.mark.parametrize("flags", [["--no-python"], ["-m"], ["-m", "--no-python"]])
def test_it_wins_over_the_other_ways_to_run_a_program(folder: Path, flags: list[str]) -> None:
    done = run_path(*flags, folder)
    assert done.stdout.startswith("[rank 0] __main__"), done.stderr


def test_another_interpreter_for_the_ranks_has_no_effect_and_that_is_said(folder: Path) -> None:
    done = run_path(folder, environment={"PYTHON_EXEC": "/bin/false"})
    assert done.stdout.startswith("[rank 0] __main__")
    assert "PYTHON_EXEC has no effect with --run-path (--run-path)" in done.stderr


def test_a_path_that_does_not_exist_is_named() -> None:
    done = run_path("nothing.zip")
    assert done.returncode == 2
    assert "there is no script 'nothing.zip'" in done.stderr
