"""What NumPy says that a reduction gives, and how arrays are compared with it: to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

from procgroup import _native
from procgroup.testing.backend_cases import FUNCTIONS, LOGICAL
from procgroup.types import ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
HALVES = ["float16", "bfloat16"]
FLOATS = [*HALVES, "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX, *FLOAT8]

OPS = [op.name for op in ReduceOp if op is not ReduceOp.PREMUL_SUM]
"""All but PREMUL_SUM, which takes a factor."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def is_defined(op: str, dtype: str) -> bool:
    """Return whether a reduction has a meaning, and so is done rather than refused: see test_reduce_ops.py."""
    return _native.supports(ReduceOp[op], dtype)


def combined(op: str, blocks: Sequence[Array]) -> Array:
    """Reduce blocks of the ranks; 16-bit floats are accumulated in float32 and rounded once."""
    dtype = blocks[0].dtype
    wide = [block.astype(np.float32) if dtype.name in HALVES else block for block in blocks]
    with np.errstate(all="ignore"):
        if op in LOGICAL:
            return np.asarray(FUNCTIONS[op].reduce(blocks)).astype(dtype)
        if op != "AVG":
            return np.asarray(reduce(_FUNCTIONS[op], wide)).astype(dtype)
        if dtype.name in INTEGERS:
            return _truncated_mean(blocks)
        total = reduce(np.add, wide)
        # Part by part: NumPy rounds twice when it divides a complex number.
        parts = total.view(total.real.dtype)
        return np.asarray(parts / parts.dtype.type(len(blocks))).view(total.dtype).astype(dtype)


def _truncated_mean(blocks: Sequence[Array]) -> Array:
    """Return the mean of integers whose sum does not overflow, truncated toward zero."""
    total = reduce(np.add, [block.astype(object if block.itemsize == 8 else np.int64) for block in blocks])
    return np.asarray(np.sign(total) * (abs(total) // len(blocks))).astype(blocks[0].dtype)


def _minimum(left: Array, right: Array) -> Array:
    """NumPy leaves open which zero it picks; here the negative one is the smaller."""
    picked = np.minimum(left, right)
    return np.where((left == right) & np.signbit(left), left, picked) if left.dtype.kind == "f" else picked


def _maximum(left: Array, right: Array) -> Array:
    picked = np.maximum(left, right)
    return np.where((left == right) & ~np.signbit(left), left, picked) if left.dtype.kind == "f" else picked


_FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {**FUNCTIONS, "MIN": _minimum, "MAX": _maximum}


def same_elements(left: Array, right: Array, to_the_bit: bool = False) -> Array:
    """Return which elements are equal to the bit, or else both NaN, or both zero complex numbers."""
    bytes_of = [array.view(np.uint8).reshape(array.size, -1) for array in (left, right)]
    equal = (bytes_of[0] == bytes_of[1]).all(axis=1)
    if to_the_bit or left.dtype.name not in (*FLOATS, *COMPLEX):
        return np.asarray(equal)
    if left.dtype.name in COMPLEX:
        return np.asarray(equal | (left == right))
    return np.asarray(equal | (np.isnan(left) & np.isnan(right)))


def difference(got: Array, wanted: Array, to_the_bit: bool = False) -> str:
    """Describe the elements in which two arrays differ; "" for none."""
    got = np.ascontiguousarray(got).reshape(-1)
    if got.dtype != wanted.dtype or got.size != wanted.size:
        return f"{got.size} {got.dtype} instead of {wanted.size} {wanted.dtype}"
    if got.tobytes() == wanted.tobytes():
        return ""
    where = np.flatnonzero(~same_elements(got, wanted, to_the_bit))
    shown = ", ".join(f"[{index}] = {got[index]!r} instead of {wanted[index]!r}" for index in where[:3])
    return f"{where.size} of {got.size} elements are wrong: {shown}" if where.size else ""


def digest(*arrays: Array) -> str:
    """A hash over the bits of arrays."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]
