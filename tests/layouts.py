"""Layouts of arrays in memory. Beside an array that does not fill its memory, every byte is `GUARD`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from oracle import Array

GUARD = 0x4D
Shape = tuple[int, ...]


def _memory(shape: Shape, dtype: Any) -> Array:
    return np.full(int(np.prod(shape)) * dtype.itemsize, GUARD, np.uint8).view(dtype).reshape(shape)


def _offset(shape: Shape, dtype: Any) -> Array:
    return _memory((int(np.prod(shape)) + 5,), dtype)[3:-2].reshape(shape)


def _steps(shape: Shape, dtype: Any) -> Array:
    return _memory(tuple(2 * length + 1 for length in shape), dtype)[(..., *(slice(1, None, 2) for _ in shape))]


def _backwards(shape: Shape, dtype: Any) -> Array:
    return _memory(shape, dtype)[(..., *(slice(None, None, -1) for _ in shape))]


def _column(shape: Shape, dtype: Any) -> Array:
    return _memory((*shape, 3), dtype)[..., 1]


def _transposed(shape: Shape, dtype: Any) -> Array:
    return _memory(shape[::-1], dtype).T


def _third_axis(shape: Shape, dtype: Any) -> Array:
    return _memory((*shape[:0:-1], 2, *shape[:1]), dtype)[..., 0, :].T if shape else _memory(shape, dtype)


def _flat(count: int) -> Shape:
    return (count,)


def _matrix(count: int) -> Shape:
    """Rows of equal length, as many as divide the count; one element has no dimension."""
    rows = next((rows for rows in (3, 2, 5) if count % rows == 0), 1)
    return (rows, count // rows) if count != 1 else ()


LAYOUTS: dict[str, tuple[Callable[[int], Shape], Callable[[Shape, Any], Array]]] = {
    "flat": (_flat, _memory),
    "offset": (_flat, _offset),
    "steps": (_flat, _steps),
    "backwards": (_flat, _backwards),
    "column": (_flat, _column),
    "matrix": (_matrix, _memory),
    "one row": (lambda count: (1, count), _memory),
    "one column": (lambda count: (count, 1), _memory),
    "three dimensions": (lambda count: (1, count, 1), _memory),
    "matrix at an offset": (_matrix, _offset),
    "matrix in steps": (_matrix, _steps),
    "matrix backwards": (_matrix, _backwards),
    "matrix of columns": (_matrix, _column),
    "transposed": (_matrix, _transposed),
    "both reversed": (_matrix, lambda shape, dtype: _backwards(shape[::-1], dtype).T),
    "third axis": (_matrix, _third_axis),
}
FLAT = [kind for kind, (shape, _) in LAYOUTS.items() if shape is _flat]
SHAPES = ["flat", "matrix", "one row", "one column", "three dimensions"]
"""Shapes of arrays that fill their memory in order."""
FROZEN = "frozen"
"""Read-only, and one element in memory where all are equal: for inputs only."""


def arranged(elements: Array, kind: str) -> Array:
    """Return an array in the layout ``kind`` that has, in C order, these elements."""
    if kind == FROZEN:
        return _frozen(elements)
    shape_of, make = LAYOUTS[kind]
    array = make(shape_of(elements.size), elements.dtype)
    array[...] = elements.reshape(array.shape)
    return array


def _frozen(elements: Array) -> Array:
    bits = elements.view(np.uint8).reshape(elements.size, elements.itemsize)
    if elements.size and (bits == bits[0]).all():
        return np.broadcast_to(elements[0].copy().reshape(()), _matrix(elements.size))
    array = elements.reshape(_matrix(elements.size)).copy()
    array.flags.writeable = False
    return array
