"""Arrays in memory that other ranks read in place.

In memory shared by the ranks of one host, allocation is not collective: a rank may allocate at any time. The memory
lives as long as an array uses it, even after destroy_process_group, and a forked child shares it with its parent.
Ordinary memory is used in a world of 1, if ranks share no memory, and before init_process_group.

On a GPU it is collective: NCCL registers the memory on all ranks of a group, until the group ends.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from procgroup.api.default_group import Group, choose, slot
from procgroup.api.options import gpu_of
from procgroup.arrays import making

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")


@overload
def empty(
    shape: int | Sequence[int], dtype: Any = None, *, library: Literal["numpy"] | None = None
) -> NDArray[Any]: ...
@overload
def empty(shape: int | Sequence[int], dtype: Any = None, *, like: T, library: None = None) -> T: ...
@overload
def empty(
    shape: int | Sequence[int],
    dtype: Any = None,
    *,
    like: Any = None,
    library: str | None = None,
    device: Any = None,
    group: Group = None,
) -> Any: ...
def empty(
    shape: int | Sequence[int],
    dtype: Any = None,
    *,
    like: Any = None,
    library: str | None = None,
    device: Any = None,
    group: Group = None,
) -> Any:
    """Return a new array in shared memory, or in NCCL's memory of a GPU; its elements are arbitrary.

    ``library`` is "numpy" or "torch", by default that of the array ``like``, or "numpy". ``dtype``, of any library
    or by name, is by default that of ``like``, or float32. Raises MemoryError when the system refuses memory.

    With ``device``, a GPU as in init_process_group's ``device_id``, the array is a torch tensor (the default if torch
    is imported) or a CuPy array. All ranks of ``group``, by default of all, call it in the same order with arrays of
    one size: NCCL then reads and writes this memory in place in the group's calls. The call is a collective of the
    group. Raises CollectiveMismatch if the sizes differ, ArgumentError if the group has no "nccl" backend or uses
    another GPU, DistBackendError if NCCL fails, for example out of memory; the other ranks then keep waiting for this
    rank.
    """
    number = gpu_of(device, "device")
    library = _library(like, library) if number is None else _gpu_library(like, library)
    name = making.dtype_name(like.dtype if dtype is None and like is not None else dtype or "float32")
    lengths = making.shape_of(shape)
    nbytes = math.prod(lengths) * making.itemsize_of(name)
    if number is not None:
        chosen = choose(group, "empty")
        if chosen is None:
            raise ValueError("an array on a GPU is made by the ranks of its group, and this rank is not in `group`")
        return making.on_gpu(chosen.allocate_on_gpu(max(nbytes, 1), number), number, lengths, name, library)
    world = slot().group
    memory = None if world is None or nbytes == 0 else world.allocate(nbytes)
    return making.over(bytearray(nbytes) if memory is None else memory, lengths, name, library)


@overload
def zeros(
    shape: int | Sequence[int], dtype: Any = None, *, library: Literal["numpy"] | None = None
) -> NDArray[Any]: ...
@overload
def zeros(shape: int | Sequence[int], dtype: Any = None, *, like: T, library: None = None) -> T: ...
@overload
def zeros(
    shape: int | Sequence[int],
    dtype: Any = None,
    *,
    like: Any = None,
    library: str | None = None,
    device: Any = None,
    group: Group = None,
) -> Any: ...
def zeros(
    shape: int | Sequence[int],
    dtype: Any = None,
    *,
    like: Any = None,
    library: str | None = None,
    device: Any = None,
    group: Group = None,
) -> Any:
    """Return a new array of zeros in shared memory or on a GPU. See ``empty``."""
    array = empty(shape, dtype, like=like, library=library, device=device, group=group)
    if gpu_of(device, "device") is not None:  # fresh memory of the host reads as zero
        array[...] = 0
    return array


@overload
def full(
    shape: int | Sequence[int], fill_value: Any, dtype: Any = None, *, library: Literal["numpy"] | None = None
) -> NDArray[Any]: ...
@overload
def full(shape: int | Sequence[int], fill_value: Any, dtype: Any = None, *, like: T, library: None = None) -> T: ...
@overload
def full(
    shape: int | Sequence[int],
    fill_value: Any,
    dtype: Any = None,
    *,
    like: Any = None,
    library: str | None = None,
    device: Any = None,
    group: Group = None,
) -> Any: ...
def full(
    shape: int | Sequence[int],
    fill_value: Any,
    dtype: Any = None,
    *,
    like: Any = None,
    library: str | None = None,
    device: Any = None,
    group: Group = None,
) -> Any:
    """Return a new array whose elements are all ``fill_value``, in shared memory or on a GPU. See ``empty``."""
    array = empty(shape, dtype, like=like, library=library, device=device, group=group)
    array[...] = fill_value
    return array


def _library(like: Any, library: str | None) -> str:
    chosen = library or ("numpy" if like is None else making.library_of(like))
    if chosen == "jax":
        raise TypeError("JAX arrays are immutable: allocate NumPy arrays, or use procgroup.functional.")
    if chosen not in making.LIBRARIES:
        raise ValueError(f"expected `library` to be one of {', '.join(making.LIBRARIES)}, got {library!r}")
    if chosen == "torch" and "torch" not in sys.modules:
        raise ValueError('`library` is "torch", but torch has not been imported: import it before this call')
    return chosen


def _gpu_library(like: Any, library: str | None) -> str:
    """Return which library's array on a GPU is made."""
    chosen = library or (type(like).__module__.partition(".")[0] if like is not None else None)
    if chosen is None:
        chosen = next((name for name in making.GPU_LIBRARIES if name in sys.modules), None)
    if chosen is None:
        raise ValueError('import torch or cupy, or pass `library`: "torch" or "cupy" makes the array on the GPU')
    if chosen not in making.GPU_LIBRARIES:
        raise ValueError(f"expected `library` to be one of {', '.join(making.GPU_LIBRARIES)} on a GPU, got {chosen!r}")
    return chosen
