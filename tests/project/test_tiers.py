"""The tiers and areas of the suite: every package has tests that `make quick` can choose, and every path is there."""

from __future__ import annotations

import ast
import sys
from functools import partial
from pathlib import Path

import pytest

import areas
import tiers
import world

ROOT = Path(__file__).resolve().parents[2]

MARKED = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass
"""


def packages(folder: str) -> set[str]:
    return {path.name for path in (ROOT / folder).iterdir() if path.is_dir() and path.name[0] not in "_."}


def test_every_package_is_an_area() -> None:
    of_native_tests_alone = {"base", "launch"}
    found = packages("src/procgroup") | packages("native") - {"tests"} - of_native_tests_alone
    assert found == set(areas.AREAS)


@pytest.mark.parametrize("area", ["", *areas.AREAS])
def test_the_tests_of_an_area_are_there(area: str) -> None:
    assert all((ROOT / path.partition("::")[0]).exists() for path in areas.paths(area))


def test_the_files_that_take_longest_are_there_and_begin_first() -> None:
    assert all((tiers.TESTS / file).is_file() for file in tiers.LONGEST)
    first, second = tiers.LONGEST[:2]
    assert sorted(["api/test_ranks.py", second, first], key=tiers.place) == [first, second, "api/test_ranks.py"]


def test_an_unknown_area_is_answered_with_the_known_ones() -> None:
    done = world.run_command([sys.executable, str(ROOT / "tests" / "areas.py"), "store_s"])
    assert done.returncode == 1 and "'store_s' is not an area; the areas are: api, arrays" in done.stderr


@pytest.mark.parametrize(("tier", "passed"), [("test", 1), ("landing", 1), ("all", 2)])
def test_only_the_last_tier_runs_slow_tests(tmp_path: Path, tier: str, passed: int) -> None:
    (tmp_path / "test_it.py").write_text(MARKED)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    environment = {"PROCGROUP_TEST_TIER": tier, "PYTHONPATH": str(ROOT / "tests")}
    done = world.run_command(command, directory=tmp_path, environment=environment)
    assert f"{passed} passed" in done.stdout, done.stdout


def test_an_unknown_tier_is_refused() -> None:
    environment = {"PROCGROUP_TEST_TIER": "fast", "PYTHONPATH": str(ROOT / "tests")}
    done = world.run_command([sys.executable, "-c", "import tiers"], environment=environment)
    assert "PROCGROUP_TEST_TIER must be one of quick, test, landing, all, but is 'fast'" in done.stderr


@pytest.mark.parametrize("file", tiers.LANDING)
def test_the_tests_that_are_left_to_landing_are_there(file: str) -> None:
    tree = ast.walk(ast.parse((tiers.TESTS / file).read_text()))
    assert set(tiers.LANDING[file]) - {"*"} <= {node.name for node in tree if isinstance(node, ast.FunctionDef)}


def test_of_a_test_that_is_left_to_landing_some_parameters_can_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"a.py": {"test_all": [], "test_some": ["shm"], "*": ["tcp"]}}
    monkeypatch.setattr(tiers, "LANDING", table)
    begins = partial(tiers.begins_with, "a.py", is_slow=False)
    assert begins("test_all", "2-shm") == begins("test_some", "2-tcp") == begins("test_other", "2-shm") == "landing"
    assert begins("test_some", "2-shm") == begins("test_other", "2-tcp") == begins("test_other", "2") == "test"
    assert tiers.begins_with("a.py", "test_other", "2-tcp", is_slow=True) == "all"
