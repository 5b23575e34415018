"""What the table of operations has, every other place has too: a new row names here what it still lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from collectives.playing import ISSUERS
from failures.test_every_collective import COLLECTIVES as AWAITED
from parity.cases import PREFIX, VERBS

import procgroup as dist
from procgroup import _native
from procgroup.groups.engine import COLLECTIVES

OPERATIONS = [row for row in _native.operations() if not row["is_message"]]
PAGES = Path(__file__).resolve().parents[2] / "docs" / "operations"
names = pytest.mark.parametrize("name", [row["name"] for row in OPERATIONS])


@names
def test_an_operation_is_a_method_of_groups_and_a_public_function(name: str) -> None:
    assert name in COLLECTIVES
    for owner in (_native.Group, dist.ProcessGroup, dist):
        assert callable(getattr(owner, name, None)), f"{owner} lacks {name}"


@names
def test_an_operation_has_a_page(name: str) -> None:
    pages = [page for page in PAGES.glob("*.md") if f"`{name}(" in page.read_text() or f"`{name}`" in page.read_text()]
    assert pages, f"no page of docs/operations describes {name}"


@names
def test_an_operation_is_played_by_random_calls_and_loses_a_rank_in_the_failure_tests(name: str) -> None:
    assert name in (*VERBS, *PREFIX, "barrier"), "random_calls does not play it"
    assert name in AWAITED, "failures.test_every_collective does not play it"


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: str(row["name"]))
def test_a_row_says_nothing_that_contradicts_itself(row: dict[str, object]) -> None:
    gives, takes = row["givers"] != "none", row["takers"] != "none"
    assert (row["input"] != "none") == gives
    assert (row["output"] != "none") == takes
    assert not row["reduces"] or row["output"] == "one", "a reduction makes one array"


def test_reductions_of_the_table_are_played_with_every_op_and_dtype() -> None:
    reductions = {row["name"] for row in OPERATIONS if row["reduces"]}
    assert reductions - {"reduce_scatter"} <= set(ISSUERS)
