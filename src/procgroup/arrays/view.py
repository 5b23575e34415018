"""One array, seen as memory: where it is, how many elements of which type, and whether it may be written.

The native door reads plain buffers by itself and comes here with everything else: extension types
such as bfloat16, which the buffer protocol cannot describe, and whatever it must refuse. So this is
the slow path, and the place where the words of a refusal are chosen.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

DTYPES = frozenset(
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ]
)
"""The element types that the native engine knows, by NumPy's names."""


@dataclass(frozen=True)
class ArrayView:
    """An array as memory. ``owner`` keeps the memory alive; ``address`` is meaningless without it."""

    address: int
    count: int
    dtype: str
    itemsize: int
    readonly: bool
    owner: Any

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize


def view(array: Any, writable: bool = False, name: str = "tensor") -> ArrayView:
    """Describe ``array`` as contiguous memory, copying nothing.

    Takes NumPy arrays (also 0-d and of ml_dtypes.bfloat16) and every object with the buffer protocol.
    Raises TypeError for what is not an array or has an element type that cannot be sent, and
    ValueError for an array that is not C-contiguous, not in native byte order, or, with ``writable``,
    read-only. ``name`` is the parameter that the texts speak of.
    """
    numpy_array = _as_numpy(array, name)
    _check_dtype(numpy_array.dtype, name)
    if not numpy_array.flags.c_contiguous:
        raise ValueError(
            f"`{name}` is not contiguous: shape {numpy_array.shape} has strides {numpy_array.strides}, in bytes. "
            f"Pass a contiguous copy, such as numpy.ascontiguousarray({name}), and copy the result back."
        )
    readonly = not numpy_array.flags.writeable
    if writable and readonly:
        raise ValueError(f"`{name}` is read-only, and this call writes into it. Pass a writable copy of it.")
    return ArrayView(
        address=numpy_array.ctypes.data,
        count=numpy_array.size,
        dtype=numpy_array.dtype.name,
        itemsize=numpy_array.dtype.itemsize,
        readonly=readonly,
        owner=numpy_array,
    )


def _as_numpy(array: Any, name: str) -> Any:
    import numpy

    if isinstance(array, numpy.ndarray):
        return array
    try:
        return numpy.asarray(memoryview(array))
    except (TypeError, ValueError) as error:
        raise TypeError(_not_an_array(array, name)) from error


def _not_an_array(array: Any, name: str) -> str:
    text = (
        f"Invalid function argument. Expected parameter `{name}` to be a numpy.ndarray "
        f"or another object with the buffer protocol but got {type(array)} instead."
    )
    if hasattr(array, "__dlpack__"):
        return f"{text} Pass numpy.from_dlpack({name}), which shares its memory."
    if isinstance(array, (list, tuple, int, float)):
        return f"{text} Pass numpy.asarray({name})."
    return text


def _check_dtype(dtype: Any, name: str) -> None:
    if dtype.byteorder == (">" if sys.byteorder == "little" else "<"):
        raise ValueError(
            f"`{name}` has dtype {dtype}, which is not in this machine's byte order. "
            f"Pass {name}.astype({name}.dtype.newbyteorder('='))."
        )
    if dtype.name not in DTYPES:
        raise TypeError(
            f"`{name}` has dtype {dtype}, which cannot be sent; expected one of {', '.join(sorted(DTYPES))}."
        )
