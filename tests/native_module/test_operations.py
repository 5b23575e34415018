"""The table of operations (tools/operations.py): each row is in every place that has all operations."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from operation_table import COLLECTIVES, OPERATIONS

import procgroup as dist
from procgroup import _native

ROWS = {str(row["name"]): row for row in _native.operations()}
PAGES = Path(__file__).resolve().parents[2] / "docs" / "operations"
collectives = pytest.mark.parametrize("name", COLLECTIVES)


@collectives
def test_a_call_is_a_method_of_groups_and_a_public_function(name: str) -> None:
    for owner in (_native.Group, dist.ProcessGroup, dist):
        assert callable(getattr(owner, name, None)), f"{owner} lacks {name}"


@collectives
def test_a_call_has_a_page_that_says_how_it_is_called(name: str) -> None:
    parameters = inspect.signature(getattr(dist, name)).parameters.values()
    written = (f"{one.name}={_default(one)}" if one.default is not one.empty else one.name for one in parameters)
    expected = ", ".join(written)
    pages = {page.name: " ".join(page.read_text().split()) for page in PAGES.glob("*.md")}
    if name == "exscan":
        assert "`exscan` has the same parameters" in pages["scan.md"]
        return
    found = (re.search(rf"`{name}\(([^`]*)\)`", text) for text in pages.values())
    assert expected in [match.group(1) for match in found if match]


def _default(parameter: inspect.Parameter) -> str:
    default = parameter.default
    return f"ReduceOp.{default.name}" if isinstance(default, dist.ReduceOp) else repr(default)


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
