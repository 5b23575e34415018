"""Numbers in the place of arrays: Python's bool, int, float and complex, and the scalars of NumPy.

A number travels as an array without dimensions and comes back as a number of its kind. Python's integers have no fixed
size, and a bool is one of them (True + True is 2). So their ranks' values are gathered, as int64 or bool, and every
rank combines them with Python's own operators, in rank order: no sum or product of them can overflow.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from procgroup.errors import ArgumentError
from procgroup.types import AnyReduceOp, PremulSum, ReduceOp

PYTHON = "a Python number"
NUMPY = "a NumPy scalar"
KINDS = (PYTHON, NUMPY)

_DTYPES = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_OPERATORS: dict[AnyReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
_TRUTHS: dict[AnyReduceOp, Callable[[Sequence[Any]], bool]] = {
    ReduceOp.LAND: all,
    ReduceOp.LOR: any,
    ReduceOp.LXOR: lambda values: sum(map(bool, values)) % 2 == 1,
}


def kind_of(value: Any) -> str | None:
    """Return which kind of number this is, one of KINDS; None for anything else."""
    if type(value) in _DTYPES:
        return PYTHON
    numpy = sys.modules.get("numpy")
    return NUMPY if numpy is not None and isinstance(value, numpy.generic) else None


def as_array(value: Any, name: object) -> Any:
    """Return a number as an array without dimensions. Raises ArgumentError for an int of more than 64 bits."""
    import numpy

    dtype = _DTYPES.get(type(value))
    if dtype == "int64" and not -(1 << 63) <= value < 1 << 63:
        raise ArgumentError(
            f"`{name}` is an integer of {value.bit_length() + 1} bits; expected at most 64, from -2**63 to 2**63 - 1. "
            "Send larger ones as objects, with procgroup.all_gather_object."
        )
    return numpy.array(value) if dtype is None else numpy.array(value, dtype)


def as_given(array: Any, kind: str) -> Any:
    """Return an array as what was given: a number, or for several numbers a list of Python's; else the array itself."""
    if kind == PYTHON:
        return array.tolist()
    return array[()] if kind == NUMPY else array


def combine(op: AnyReduceOp, values: Sequence[Any]) -> Any:
    """Return the integers of all ranks combined. Raises TypeError for an op that integers do not have."""
    return combiner(op)(values)


def combiner(op: AnyReduceOp) -> Callable[[Sequence[Any]], Any]:
    """Return what combines the integers of all ranks. Raises TypeError for an op that integers do not have."""
    if op == ReduceOp.AVG:
        return lambda values: sum(values) / len(values)
    if op in _TRUTHS:
        return lambda values: type(values[0])(_TRUTHS[op](values))
    if op not in _OPERATORS:
        factor = f"({op.factor})" if isinstance(op, PremulSum) else ""
        raise TypeError(f"ReduceOp.PREMUL_SUM{factor} does not exist for Python's integers; pass a float.")
    return functools.partial(functools.reduce, _OPERATORS[op])
