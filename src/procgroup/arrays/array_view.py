"""One array, seen as memory: where its elements are, how many of which type, and whether they may be written.

Made by ``procgroup.arrays.view``, for which each library has a file that describes its arrays so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HOST = -1
"""In place of the number of a CUDA device: the memory of this process."""

INTEGERS = tuple(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u"))
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = ("bool", *INTEGERS, *FLOATS, *FLOAT8)
"""The element types that the native engine knows, by NumPy's names. The float8 types are moved, never reduced."""


@dataclass(slots=True)
class ArrayView:
    """An array as memory. ``owner`` keeps the memory alive; ``address``, of the first element, is meaningless without.

    ``shape`` counts elements, ``strides`` bytes; strides may be negative or zero. ``device`` is the number of the CUDA
    device that has the memory, or HOST; on a device the elements can be neither read nor written here.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    readonly: bool
    owner: Any
    device: int = HOST

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """The length of the first dimension, 1 where there is none."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = contiguous_strides(self.shape, self.itemsize)
        if self.strides == expected or self.count == 0:
            return True
        dimensions = zip(self.shape, self.strides, expected, strict=True)
        return all(length == 1 or stride == usual for length, stride, usual in dimensions)

    def elements(self) -> Any:
        """Return a NumPy array over the same memory, whose elements are raw bytes."""
        import numpy

        if self.count == 0:  # its address may be null
            return numpy.empty(self.shape, f"V{self.itemsize}")
        return numpy.asarray(_ExportedMemory(self))

    def numbers(self) -> Any:
        """Return a NumPy array over the same memory, of this array's dtype."""
        return self.elements().view(numpy_dtype(self.dtype))

    def copy_from(self, source: ArrayView) -> None:
        """Overwrite the elements with those of an array that has as many of the same size; the two may overlap."""
        if (source.address, source.shape, source.strides) != (self.address, self.shape, self.strides):
            self.elements()[...] = source.elements().copy().reshape(self.shape)

    def to_bytes(self) -> bytes:
        """Return a copy of the elements, in C order."""
        elements: bytes = self.elements().tobytes()
        return elements


class _ExportedMemory:
    """What NumPy asks of memory at an address."""

    def __init__(self, seen: ArrayView) -> None:
        self.owner = seen
        self.__array_interface__ = {
            "version": 3,
            "data": (seen.address, seen.readonly),
            "shape": seen.shape,
            "strides": seen.strides,
            "typestr": f"|V{seen.itemsize}",
        }


def numpy_dtype(name: str) -> Any:
    """Return NumPy's dtype, or that of ml_dtypes."""
    import numpy

    if name.startswith(("bfloat16", "float8")):
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, name))
    return numpy.dtype(name)


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of an array in C order without gaps."""
    strides = []
    for length in reversed(shape):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))
