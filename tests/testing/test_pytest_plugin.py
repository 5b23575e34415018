"""The fixture that comes with the package."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import world

TEST = """
import numpy as np
import procgroup as dist


def test_ranks(ranks):
    assert ranks(dist.get_rank, 3) == [0, 1, 2]


def test_failure(ranks):
    def fail():
        assert dist.get_rank() != 1, "one is no good"

    ranks(fail, 2)
"""


def test_a_test_takes_the_fixture_and_a_failure_shows_the_rank(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "procgroup.testing.pytest_plugin"]
    done = world.run_command([*command, "test_it.py"], directory=tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "raised on rank 1 of 2" in done.stdout
    assert "one is no good" in done.stdout


def test_importing_the_plug_in_imports_no_array_library() -> None:
    program = "import sys, procgroup.testing.pytest_plugin; print([n for n in ('numpy', 'torch') if n in sys.modules])"
    assert world.run_command([sys.executable, "-c", program]).stdout.strip() == "[]"


def test_the_entry_point_is_named_as_its_module() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    name = "procgroup.testing.pytest_plugin"
    assert project["project"]["entry-points"]["pytest11"] == {name: name}
