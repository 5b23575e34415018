"""What the native table of operations has, every other place has too: a new row names here what it still lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from operation_table import OPERATIONS

import procgroup as dist
from procgroup import _native

ROWS = {str(row["name"]): row for row in _native.operations()}
PAGES = Path(__file__).resolve().parents[2] / "docs" / "operations"
collectives = pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row["is_message"]])


@collectives
def test_an_operation_is_a_method_of_groups_and_a_public_function(name: str) -> None:
    for owner in (_native.Group, dist.ProcessGroup, dist):
        assert callable(getattr(owner, name, None)), f"{owner} lacks {name}"


@collectives
def test_an_operation_has_a_page(name: str) -> None:
    pages = [page for page in PAGES.glob("*.md") if f"`{name}(" in page.read_text() or f"`{name}`" in page.read_text()]
    assert pages, f"no page of docs/operations describes {name}"


@pytest.mark.parametrize("name", ROWS)
def test_an_operation_is_in_the_table_that_the_tests_play(name: str) -> None:
    row, native = OPERATIONS[name], ROWS[name]
    assert row.reduces == native["reduces"]
    assert row.is_uneven == (native["sizes"] != "equal")
    if not native["is_message"]:
        root = "source" if native["givers"] == "root" else "destination" if native["takers"] == "root" else ""
        assert row.root == root


@pytest.mark.parametrize("row", [row for row in ROWS.values() if not row["is_message"]], ids=lambda row: row["name"])
def test_a_row_says_nothing_that_contradicts_itself(row: dict[str, object]) -> None:
    gives, takes = row["givers"] != "none", row["takers"] != "none"
    assert (row["input"] != "none") == gives
    assert (row["output"] != "none") == takes
    assert not row["reduces"] or row["output"] == "one", "a reduction makes one array"
