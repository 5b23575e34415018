"""The preflight names in words what a machine lacks, with the packages to install, and starts nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import world

PREFLIGHT = str(Path(__file__).resolve().parents[2] / "tools" / "preflight.sh")


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def preflight(**environment: str) -> subprocess.CompletedProcess[str]:
    return world.run_command(["sh", PREFLIGHT], environment=environment)


def test_prints_the_python_to_use_where_nothing_is_lacking() -> None:
    done = preflight()
    if "header is missing" in done.stderr:
        pytest.skip("this machine has no Python.h")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and not done.stderr


def test_every_lack_is_told_at_once() -> None:
    done = preflight(PYTHON="/nowhere/python3", CXX="/nowhere/c++")
    assert done.returncode == 1 and done.stdout == ""
    assert "1. Python 3.11 or newer is missing (found: no /nowhere/python3)" in done.stderr
    assert "2. A C++ compiler is missing" in done.stderr
    assert "apt-get install build-essential" in done.stderr
    assert "dnf install gcc-c++ make" in done.stderr


def test_too_old_a_python_is_named_with_its_version(tmp_path: Path) -> None:
    old = script(tmp_path / "python", '[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    done = preflight(PYTHON=old)
    assert done.returncode == 1
    assert "Python 3.11 or newer is missing (found: Python 3.9.2)" in done.stderr


def test_a_missing_header_is_named_with_its_package(tmp_path: Path) -> None:
    fake = script(
        tmp_path / "python",
        'case "$2" in *sysconfig*) echo /nowhere/include ;; *version_info\\[*) echo 3.12 ;; esac\nexit 0\n',
    )
    done = preflight(PYTHON=fake)
    assert done.returncode == 1
    assert "Python's C header is missing (no /nowhere/include/Python.h)" in done.stderr
    assert "apt-get install python3-dev" in done.stderr


def test_a_missing_venv_module_is_named_with_its_package(tmp_path: Path) -> None:
    fake = script(tmp_path / "python", 'case "$2" in *ensurepip*) exit 1 ;; esac\nexec python3 "$@"\n')
    done = preflight(PYTHON=fake)
    assert done.returncode == 1
    assert "Python's venv module is missing" in done.stderr
    assert "apt-get install python3-venv" in done.stderr


def test_a_compiler_without_cxx20_is_named_with_what_it_said(tmp_path: Path) -> None:
    old = script(
        tmp_path / "c++", '[ "$1" = --version ] && echo "g++ 7.5.0" && exit 0\necho "no concepts" >&2\nexit 1\n'
    )
    done = preflight(CXX=old)
    assert done.returncode == 1
    assert f"cannot build a C++20 program ({old}: g++ 7.5.0)" in done.stderr
    assert "It said: no concepts" in done.stderr


@pytest.mark.parametrize("system", ["Darwin", "Windows_NT"])
def test_another_system_is_told_that_linux_is_needed(tmp_path: Path, system: str) -> None:
    script(tmp_path / "uname", f"echo {system}\n")
    done = preflight(PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 1
    assert f"procgroup builds on Linux only so far; this is {system}." in done.stderr
