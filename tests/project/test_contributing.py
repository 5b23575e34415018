"""CONTRIBUTING.md names the files of each kind of addition, and each of them is there."""

from __future__ import annotations

import re

import pytest

from documentation.page_programs import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
WALK = re.compile(r"^\*\*(?:An?|A check of) `?([a-z ]+)`?\.?\*\*(.*?)(?=^\*\*|^## )", re.MULTILINE | re.DOTALL)
WALKS = dict(WALK.findall(TEXT))
PATH = re.compile(r"`((?:native|src|tests|tools|docs|examples|benchmarks)/[\w./]+)`")


def test_there_is_a_walk_for_each_kind_of_addition() -> None:
    assert list(WALKS) == ["reduce op", "operation", "store", "backend", "procgroup doctor", "error"]


@pytest.mark.parametrize("kind", WALKS)
def test_a_walk_has_steps_and_names_code_tests_and_a_page(kind: str) -> None:
    steps = re.findall(r"^(\d+)\. ", WALKS[kind], re.MULTILINE)
    assert steps == [str(number) for number in range(1, len(steps) + 1)]
    assert {path.partition("/")[0] for path in PATH.findall(WALKS[kind])} >= {"src", "tests", "docs"}


@pytest.mark.parametrize("path", sorted(set(PATH.findall(TEXT))))
def test_the_files_that_the_page_names_are_there(path: str) -> None:
    assert (ROOT / path).exists(), f"CONTRIBUTING.md names {path}"
