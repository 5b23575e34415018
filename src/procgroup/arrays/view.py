"""Any library's array, seen as memory, or refused in words.

The native adapter reads plain buffers and torch's own tensors itself, and passes everything else here: extension
types such as bfloat16, which the buffer protocol cannot describe, other libraries, and whatever must be refused. So
this is the slow path, and the place where the words of a refusal are chosen. Each library has a file of its own.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from procgroup.arrays import cuda_array, numpy_array
from procgroup.arrays.array_view import DTYPES, ArrayView
from procgroup.errors import ArgumentError


def view(array: Any, writable: bool = False, name: str = "tensor", on_devices: bool = False) -> ArrayView:
    """Describe ``array`` as memory, copying nothing.

    Takes NumPy arrays (also of ml_dtypes), torch tensors, JAX arrays, and every object with the buffer protocol or
    DLPack, with any strides; with ``on_devices``, also arrays on CUDA devices. Raises TypeError for an object that is
    not an array, is masked, is in the memory of another device or has an element type that cannot be sent, and
    ArgumentError (a ValueError) for an array that is not in native byte order or, with ``writable``, is read-only or
    has several elements in one place. ``name`` is the name of the parameter in error texts.
    """
    seen = cuda_array.view(array, name) if on_devices and cuda_array.is_cuda_array(array) else None
    if seen is None:
        seen = _of_any_library(array, writable, name)
    if seen.dtype not in DTYPES:
        raise TypeError(
            f"`{name}` has dtype {seen.dtype}, which cannot be sent; expected one of {', '.join(sorted(DTYPES))}."
            f"{_sent_otherwise(array, name)}"
        )
    if writable and seen.readonly:
        raise ArgumentError(f"`{name}` is read-only, and this call writes into it. {_writable_copy(array, name)}")
    if writable and not seen.is_contiguous and _overlaps_itself(seen):
        raise ArgumentError(
            f"`{name}` has several elements in one place, as broadcast views have, and this call writes into it: "
            f"shape {seen.shape}, strides {seen.strides} in bytes. Pass a copy of it."
        )
    return seen


def _of_any_library(array: Any, writable: bool, name: str) -> ArrayView:
    import numpy

    if isinstance(array, numpy.ndarray):
        return numpy_array.view(array, name)
    if cuda_array.is_cuda_array(array):
        raise TypeError(cuda_array.refusal(array, name))
    for library, module in _LIBRARIES:
        # An array of a library that was never imported cannot exist.
        if library in sys.modules:
            seen: ArrayView | None = _module(module).view(array, writable, name)
            if seen is not None:
                return seen
    try:
        return numpy_array.view(numpy.asarray(memoryview(array)), name)
    except (TypeError, ValueError) as error:
        if hasattr(array, "__dlpack__"):
            from procgroup.arrays import dlpack

            return dlpack.view(array, name)
        raise TypeError(_not_an_array(array, name)) from error


_LIBRARIES = (("torch", "torch_tensor"), ("jax", "jax_array"))


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(f"procgroup.arrays.{name}")


def _overlaps_itself(seen: ArrayView) -> bool:
    """Return whether two elements share memory: by their strides in usual layouts, else element by element."""
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


def _writable_copy(array: Any, name: str) -> str:
    """Say how to make an array that this call can write into; it gets the result."""
    import numpy

    if isinstance(array, numpy.generic):
        return f"Pass an array of it, numpy.array({name}), which then has the result: a NumPy scalar never changes."
    if isinstance(array, numpy.ndarray):
        return f"Pass a writable copy, {name}.copy()."
    if isinstance(array, bytes):
        return f"Pass a writable copy, bytearray({name})."
    return f"Pass a writable copy, numpy.array({name})."


def _sent_otherwise(array: Any, name: str) -> str:
    """Say how elements of such a NumPy dtype are sent; "" where nothing is known."""
    dtype: Any = getattr(array, "dtype", None)
    kind = getattr(dtype, "kind", "")
    if kind == "V" and dtype.names:
        return (
            f" Pass {name}.view(numpy.uint8), where every rank has the same dtype and nothing is reduced, or one field "
            f"after the other: {name}[{dtype.names[0]!r}]."
        )
    if kind in "mM":
        return f" Pass {name}.view(numpy.int64), which has the same memory."
    if kind in "USTO":
        return f" Send it as an object: all_gather_object([...], {name}), broadcast_object_list([{name}])."
    if kind in "fc":
        return f" Pass {name}.astype(numpy.{'complex128' if kind == 'c' else 'float64'})."
    return ""


def _not_an_array(array: Any, name: str) -> str:
    text = (
        f"Invalid function argument. Expected parameter `{name}` to be a numpy.ndarray, a torch.Tensor "
        f"or another object with DLPack or the buffer protocol but got {type(array)} instead."
    )
    if hasattr(array, "to_numpy"):
        return f"{text} Pass {name}.to_numpy(); where the call writes, that array has the result."
    if isinstance(array, (str, dict, set, frozenset)):
        return f"{text} Send it as an object: all_gather_object([...], {name}), broadcast_object_list([{name}])."
    if isinstance(array, (list, tuple, int, float, complex)):
        return f"{text} Pass an array of it, numpy.array({name}); where the call writes, that has the result."
    return text
