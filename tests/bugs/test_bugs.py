"""Programs with one bug each: the other ranks name the guilty rank and its line, in time, and no number is wrong.

The name of a test has the surrounding and the program. ``python tests/bugs/table.py`` prints all of them as a table,
with torch.distributed and Gloo beside them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from bugs.bug import Bug, all_bugs
from bugs.surroundings import SURROUNDINGS, Surroundings
from bugs.verdict import try_out

BUGS = all_bugs()
CELLS = [(bug, name) for bug in BUGS.values() for name in SURROUNDINGS if name not in bug.left_out]
SAMPLE = random.Random(1).sample(CELLS, 40)


@pytest.fixture(scope="module")
def surroundings() -> Iterator[Surroundings]:
    with Surroundings() as started:
        yield started


@pytest.mark.parametrize(
    ("bug", "surrounding"),
    [
        pytest.param(bug, name, id=f"{name}-{bug.name}", marks=() if (bug, name) in SAMPLE else pytest.mark.slow)
        for bug, name in CELLS
    ],
)
def test_the_guilty_rank_is_named_in_time(bug: Bug, surrounding: str, surroundings: Surroundings) -> None:
    if lack := SURROUNDINGS[surrounding].lacks():
        pytest.skip(lack)
    verdict = try_out(bug, SURROUNDINGS[surrounding], surroundings)
    assert verdict.is_ok, f"{bug.sentence} {verdict}: {verdict.reason}"


def test_there_are_many_bugs() -> None:
    assert len(BUGS) >= 40


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_each_bug_has_a_sentence_and_one_marked_line(bug: Bug) -> None:
    assert bug.sentence.endswith(".")
    assert bug.line > 0
