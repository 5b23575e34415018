"""New arrays of any library: over memory that is given, or as plain copies."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any

from procgroup.arrays.array_view import DTYPES, numpy_dtype
from procgroup.errors import ArgumentError

LIBRARIES = ("numpy", "torch")
"""The libraries whose arrays can be made in given memory, and be written."""
GPU_LIBRARIES = ("torch", "cupy")
"""The same for memory on a GPU."""


def library_of(array: Any) -> str:
    """Return which library's arrays an array is to be answered with: "numpy", "torch" or "jax"."""
    for library, base in (("torch", "Tensor"), ("jax", "Array")):
        if isinstance(array, getattr(sys.modules.get(library), base, ())):
            return library
    return "numpy"


def shape_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape as a tuple. Raises ValueError for negative lengths."""
    lengths = (shape,) if hasattr(shape, "__index__") else tuple(shape)
    found = tuple(int(length.__index__()) for length in lengths)
    if any(length < 0 for length in found):
        raise ValueError(f"expected lengths of at least 0 in `shape`, got {shape}")
    return found


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of any library, or of its name. Raises TypeError for one that cannot be sent."""
    import numpy

    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        name = numpy.dtype(dtype).name
    if name not in DTYPES:
        raise TypeError(f"expected `dtype` to be one of {', '.join(sorted(DTYPES))}, got {dtype!r}")
    return name


def itemsize_of(name: str) -> int:
    """Return how many bytes an element has."""
    if name == "bool" or name.startswith("float8"):
        return 1
    return int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


def on_gpu(memory: Any, device: int, shape: tuple[int, ...], dtype: str, library: str) -> Any:
    """Return an array over memory with the CUDA array interface, which it keeps alive.

    ``library`` is one of GPU_LIBRARIES.
    """
    nbytes = math.prod(shape) * itemsize_of(dtype)
    if library == "torch":
        torch = importlib.import_module("torch")
        return torch.as_tensor(memory, device=f"cuda:{device}")[:nbytes].view(getattr(torch, dtype)).reshape(shape)
    cupy = importlib.import_module("cupy")
    return cupy.asarray(memory)[:nbytes].view(numpy_dtype(dtype)).reshape(shape)


@functools.cache
def torch_allocator() -> Any:
    """Return torch's form of the allocator that the native module exports. A pool needs it for as long as it lives."""
    from procgroup import _native

    torch = importlib.import_module("torch")
    if not torch.backends.cuda.is_built():
        raise ArgumentError(f"mem_allocator: torch {torch.__version__} is built without CUDA; expected one with it.")
    names = "procgroup_allocate", "procgroup_free"
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, *names).allocator()


def over(memory: Any, shape: tuple[int, ...], dtype: str, library: str) -> Any:
    """Return an array over a writable buffer, which it keeps alive. ``library`` is one of LIBRARIES, or "jax".

    JAX's array may be a copy: do not write into the buffer afterwards.
    """
    if library == "torch":
        from procgroup.arrays import torch_tensor

        return torch_tensor.over(memory, shape, dtype)
    import numpy

    element = numpy_dtype(dtype)
    array = numpy.frombuffer(memory, element, math.prod(shape)).reshape(shape) if 0 not in shape else None
    if array is None:
        array = numpy.empty(shape, element)
    if library == "jax":
        from procgroup.arrays import jax_array

        return jax_array.new(array)
    return array
