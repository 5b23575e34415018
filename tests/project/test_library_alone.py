"""The library needs none of the other three parts of design.md: its own tests pass on a copy without them."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

import procgroup
from procgroup import _native
from world import run_command

ROOT = Path(__file__).resolve().parents[2]

KEPT = "procgroup.testing"
"""The tests' own tool: it makes ranks of threads, and has the oracle and the contract of backends. It uses the library
only, which another contract holds."""

# An installation in place finds the modules of procgroup by a table, ahead of sys.path.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
"""

IS_ALONE = """
import importlib.util, sys, procgroup
from procgroup import _native
assert procgroup.__file__.startswith(sys.argv[1]) and _native.__file__.startswith(sys.argv[1])
print([name for name in sys.argv[2:] if importlib.util.find_spec(name) is not None])
"""

# Some of each package, because CI has 30 minutes for everything.
CHOSEN = [
    "arrays",
    *(f"api/test_{name}.py" for name in ("collectives_alone", "one_call", "world_of_one")),
    "backends/test_route.py",
    "collectives/test_collectives.py::test_each_operation_is_right_by_each_of_its_schedules[2-shm]",
    "failures/test_dead_peer.py",
    "functional/test_functional.py",
    *(f"groups/test_{name}.py" for name in ("group", "new_group", "objects")),
    "rendezvous/test_join.py",
    *(f"stores/test_{name}.py" for name in ("file", "hash", "start_up")),
]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH that has procgroup without its other parts."""
    package = Path(procgroup.__file__).parent
    left_out = {name.rpartition(".")[2] for name in other_parts() if name != KEPT}

    def is_left_out(directory: str, names: list[str]) -> list[str]:
        of_package = [name for name in names if name.partition(".")[0] in left_out] if directory == str(package) else []
        return [*of_package, *(name for name in names if name == "__pycache__")]

    shutil.copytree(package, tmp_path / "procgroup", ignore=is_left_out)
    shutil.copy(_native.__file__, tmp_path / "procgroup")
    (tmp_path / "sitecustomize.py").write_text(SITE)
    return tmp_path


def other_parts() -> list[str]:
    """Return the names that the contract of the library forbids."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (forbidden,) = (one["forbidden_modules"] for one in contracts if one.get("id") == "library")
    return list(forbidden)


@pytest.mark.timeout(600)
def test_the_library_s_tests_pass_without_the_launcher_the_integrations_and_the_tools(library: Path) -> None:
    paths = os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    # The plug-in, which torch would load by its entry point, is not in the copy.
    environment = {"PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    deleted = [name for name in other_parts() if name != KEPT]
    done = run_command([sys.executable, "-c", IS_ALONE, str(library), *deleted], environment=environment)
    assert done.stdout == "[]\n", done.stdout + done.stderr

    chosen = [f"tests/{test}" for test in CHOSEN]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *chosen]
    done = run_command(command, timeout=580, directory=ROOT, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
