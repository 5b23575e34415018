"""What the native table of reduce ops has, every other place has too: a new row names here what it still lacks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from oracle import COMPLEX, DTYPES, FLOAT8, FLOATS, INTEGERS, Array, combined, is_defined, numpy_dtype
from procgroup import _native
from procgroup.functional import numbers
from procgroup.testing.backend_cases import FUNCTIONS, LOGICAL
from procgroup.types import ReduceOp

ROWS = {row["name"]: row for row in _native.reduce_ops()}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations" / "all_reduce.md"
KINDS = {"bool": ["bool"], "integers": INTEGERS, "floating point": FLOATS, "complex": COMPLEX, "float8": FLOAT8}
every_op = pytest.mark.parametrize("name", ROWS)


def described() -> dict[str, tuple[str, str]]:
    """Return the element types and the identity of each op, as the page has them."""
    rows = re.findall(r"^\| `([^|]*) \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    return {
        re.split(r"[`(]", name)[0]: (types, identity) for names, types, identity in rows for name in names.split(", `")
    }


def identity(text: str, dtype: str) -> Array:
    """Return what the page says in words."""
    kind = numpy_dtype(dtype)
    limits = (False, True) if dtype == "bool" else (-np.inf, np.inf) if dtype in FLOATS else None
    smallest, largest = limits or (np.iinfo(kind).min, np.iinfo(kind).max)
    if text == "all bits":
        return ~np.zeros(1, kind)
    return np.array([{"0": 0, "1": 1, "the smallest": smallest, "the largest": largest}[text]]).astype(kind)


def test_the_members_of_reduce_op_are_the_rows() -> None:
    assert [(op.name, op.value) for op in ReduceOp] == [(name, number) for number, name in enumerate(ROWS)]


@every_op
def test_what_combines_prepared_elements_prepares_nothing(name: str) -> None:
    assert ROWS[ROWS[name]["combines"]]["combines"] == ROWS[name]["combines"]


@every_op
def test_the_page_says_what_an_op_takes(name: str) -> None:
    assert name in described(), f"{PAGE} has no row for {name}"
    kinds = described()[name][0].split(", ")
    assert {dtype for kind in kinds for dtype in KINDS[kind]} == {dtype for dtype in DTYPES if is_defined(name, dtype)}


@pytest.mark.parametrize("name", [name for name in ROWS if name != "AVG"])
def test_the_identity_of_the_page_changes_no_element(name: str) -> None:
    text = described()[name][1]
    for dtype in (dtype for dtype in [*INTEGERS, "float32", "bool"] if is_defined(name, dtype)):
        elements = np.array([0, 1, 7][: 2 if name in LOGICAL else 3]).astype(numpy_dtype(dtype))
        result = np.empty_like(elements)
        sources = [elements, np.repeat(identity(text, dtype), elements.size)]
        _native.reduce_elements(dtype, ReduceOp[name], result.view(np.uint8), [each.view(np.uint8) for each in sources])
        assert result.tolist() == elements.tolist(), dtype


@every_op
def test_numbers_of_python_have_the_ops_of_integers(name: str) -> None:
    if not is_defined(name, "int64"):
        with pytest.raises(TypeError, match=name):
            numbers.combiner(ReduceOp[name])
        return
    for values in ([6], [0], [6, 3], [6, 0, 12], [True], [True, False, True]):
        is_number = name in ("SUM", "PRODUCT", "AVG")  # of bools, too
        arrays = [np.array([value], float if name == "AVG" else int if is_number else None) for value in values]
        assert numbers.combiner(ReduceOp[name])(values) == combined(name, arrays)[0], values


@every_op
def test_the_contract_of_backends_knows_an_op(name: str) -> None:
    assert name in FUNCTIONS


def test_the_plug_in_takes_each_op_that_torch_has() -> None:
    torch = pytest.importorskip("torch")
    from procgroup.torch_plugin import arguments

    theirs = torch.distributed.ReduceOp
    shared = [name for name in ROWS if name in theirs.RedOpType.__members__ and name != "PREMUL_SUM"]
    assert set(ROWS) - set(shared) == {"PREMUL_SUM", *LOGICAL}
    for name in shared:
        assert arguments.reduce_op(theirs(theirs.RedOpType.__members__[name])) is ReduceOp[name]
