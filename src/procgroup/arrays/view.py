"""One array, seen as memory: where its elements are, how many of which type, and whether they may be written.

The native door reads plain buffers and torch's own tensors by itself and comes here with everything else: extension
types such as bfloat16, which the buffer protocol cannot describe, other libraries, and whatever must be refused. So
this is the slow path, and the place where the words of a refusal are chosen. Each library has a file of its own.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from procgroup.errors import ArgumentError

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
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
)
"""The element types that the native engine knows, by NumPy's names. The float8 types are moved, never reduced."""


@dataclass(frozen=True)
class ArrayView:
    """An array as memory. ``owner`` keeps the memory alive; ``address``, of the first element, is meaningless without.

    ``shape`` counts elements, ``strides`` bytes; strides may be negative or zero.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    readonly: bool
    owner: Any

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
        return self.count == 0 or all(
            length == 1 or stride == expected
            for length, stride, expected in zip(
                self.shape, self.strides, contiguous_strides(self.shape, self.itemsize), strict=True
            )
        )

    def elements(self) -> Any:
        """Return a NumPy array over the same memory, whose elements are raw bytes."""
        import numpy

        if self.count == 0:  # its address may be null
            return numpy.empty(self.shape, f"V{self.itemsize}")
        return numpy.asarray(_Memory(self))

    def numbers(self) -> Any:
        """Return a NumPy array over the same memory, of this array's dtype."""
        import numpy

        if self.dtype.startswith(("bfloat16", "float8")):
            import ml_dtypes

            return self.elements().view(getattr(ml_dtypes, self.dtype))
        return self.elements().view(numpy.dtype(self.dtype))

    def copy_from(self, source: ArrayView) -> None:
        """Overwrite the elements with those of an array that has as many of the same size; the two may overlap."""
        if (source.address, source.shape, source.strides) != (self.address, self.shape, self.strides):
            self.elements()[...] = source.elements().copy().reshape(self.shape)

    def to_bytes(self) -> bytes:
        """Return a copy of the elements, in C order."""
        elements: bytes = self.elements().tobytes()
        return elements

    def copy_from_bytes(self, elements: bytes) -> None:
        """Overwrite the elements with ``nbytes`` bytes, in C order."""
        import numpy

        if elements:
            self.elements()[...] = numpy.frombuffer(elements, f"V{self.itemsize}").reshape(self.shape)


class _Memory:
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


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of an array in C order without gaps."""
    strides = []
    for length in reversed(shape):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))


def view(array: Any, writable: bool = False, name: str = "tensor") -> ArrayView:
    """Describe ``array`` as memory, copying nothing.

    Takes NumPy arrays (also of ml_dtypes), torch tensors, JAX arrays, and every object with the buffer protocol or
    DLPack, with any strides. Raises TypeError for what is not an array, is masked, lies in the memory of another device
    or has an element type that cannot be sent, and ArgumentError (a ValueError) for an array that is not in native byte
    order or, with ``writable``, is read-only or has several elements in one place. ``name`` is the parameter that
    the texts speak of.
    """
    seen = _of_any_library(array, writable, name)
    if seen.dtype not in DTYPES:
        raise TypeError(
            f"`{name}` has dtype {seen.dtype}, which cannot be sent; expected one of {', '.join(sorted(DTYPES))}."
        )
    if writable and seen.readonly:
        raise ArgumentError(f"`{name}` is read-only, and this call writes into it. Pass a writable copy of it.")
    if writable and not seen.is_contiguous and _overlaps_itself(seen):
        raise ArgumentError(
            f"`{name}` has several elements in one place, as broadcast views have, and this call writes into it: "
            f"shape {seen.shape}, strides {seen.strides} in bytes. Pass a copy of it."
        )
    return seen


def _of_any_library(array: Any, writable: bool, name: str) -> ArrayView:
    import numpy

    if isinstance(array, numpy.ndarray):
        return of_numpy(array, name)
    for library, module in _LIBRARIES:
        # An array of a library that was never imported cannot exist.
        if library in sys.modules:
            from importlib import import_module

            seen = import_module(f"procgroup.arrays.{module}").view(array, writable, name)
            if seen is not None:
                return seen  # type: ignore[no-any-return]
    try:
        return of_numpy(numpy.asarray(memoryview(array)), name)
    except (TypeError, ValueError) as error:
        if hasattr(array, "__dlpack__"):
            from procgroup.arrays import dlpack

            return dlpack.view(array, name)
        raise TypeError(_not_an_array(array, name)) from error


_LIBRARIES = (("torch", "torch_tensor"), ("jax", "jax_array"), ("cupy", "cupy_array"))


def of_numpy(array: Any, name: str) -> ArrayView:
    """Describe a NumPy array. Raises TypeError for a masked one, ArgumentError for one in another byte order."""
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise TypeError(
            f"`{name}` is a masked array, and a mask is not sent. Pass {name}.filled(value), or the elements and the "
            f"mask in two calls: {name}.data and numpy.ma.getmaskarray({name})."
        )
    if array.dtype.byteorder == (">" if sys.byteorder == "little" else "<"):
        raise ArgumentError(
            f"`{name}` has dtype {array.dtype}, which is not in this machine's byte order. "
            f"Pass {name}.astype({name}.dtype.newbyteorder('='))."
        )
    return ArrayView(
        address=array.__array_interface__["data"][0],
        shape=array.shape,
        strides=array.strides,
        dtype=_name_of_dtype(array.dtype),
        itemsize=array.dtype.itemsize,
        readonly=not array.flags.writeable,
        owner=array,
    )


@functools.lru_cache(maxsize=64)
def _name_of_dtype(dtype: Any) -> str:
    """Return ``dtype.name``, which NumPy makes anew each time, and which takes longer than all else of a view."""
    name: str = dtype.name
    return name


def _overlaps_itself(seen: ArrayView) -> bool:
    """Tell whether two elements share memory: by their strides in usual layouts, else element by element."""
    import numpy

    lengths = [(abs(stride), length) for stride, length in zip(seen.strides, seen.shape, strict=True) if length > 1]
    covered = seen.itemsize
    for stride, length in sorted(lengths):
        if stride < covered:
            break
        covered += stride * (length - 1)
    else:
        return False
    offsets = numpy.zeros((), numpy.int64)
    for stride, length in zip(seen.strides, seen.shape, strict=True):
        offsets = numpy.add.outer(offsets, numpy.arange(length, dtype=numpy.int64) * stride)
    return bool((numpy.diff(numpy.sort(offsets.ravel())) < seen.itemsize).any())


def _not_an_array(array: Any, name: str) -> str:
    text = (
        f"Invalid function argument. Expected parameter `{name}` to be a numpy.ndarray, a torch.Tensor "
        f"or another object with DLPack or the buffer protocol but got {type(array)} instead."
    )
    if isinstance(array, (list, tuple, int, float)):
        return f"{text} Pass numpy.asarray({name})."
    return text
