"""Arrays in memory that the ranks of one host share: the others read them in place, which halves what is copied.

Allocating is not collective: each rank does it when it likes, and no rank has to do it. The memory lives until the
last array over it goes, also beyond destroy_process_group. In a world of 1, between hosts and before
init_process_group it is ordinary memory. A forked child shares it with its parent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from procgroup.api.default_group import slot
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
def empty(shape: int | Sequence[int], dtype: Any = None, *, like: Any = None, library: str | None = None) -> Any: ...
def empty(shape: int | Sequence[int], dtype: Any = None, *, like: Any = None, library: str | None = None) -> Any:
    """Return a new array in shared memory; its elements are arbitrary.

    ``library`` is "numpy" or "torch", by default that of the array ``like``, or "numpy". ``dtype``, of any library
    or by name, is by default that of ``like``, or float32. Raises MemoryError when the system refuses memory.
    """
    library = _library(like, library)
    name = making.dtype_name(like.dtype if dtype is None and like is not None else dtype or "float32")
    lengths = making.shape_of(shape)
    nbytes = math.prod(lengths) * making.itemsize_of(name)
    group = slot().group
    memory = None if group is None or nbytes == 0 else group.allocate(nbytes)
    return making.over(bytearray(nbytes) if memory is None else memory, lengths, name, library)


@overload
def zeros(
    shape: int | Sequence[int], dtype: Any = None, *, library: Literal["numpy"] | None = None
) -> NDArray[Any]: ...
@overload
def zeros(shape: int | Sequence[int], dtype: Any = None, *, like: T, library: None = None) -> T: ...
@overload
def zeros(shape: int | Sequence[int], dtype: Any = None, *, like: Any = None, library: str | None = None) -> Any: ...
def zeros(shape: int | Sequence[int], dtype: Any = None, *, like: Any = None, library: str | None = None) -> Any:
    """Return a new array of zeros in shared memory. See ``empty``."""
    return empty(shape, dtype, like=like, library=library)  # fresh memory reads as zero


@overload
def full(
    shape: int | Sequence[int], fill_value: Any, dtype: Any = None, *, library: Literal["numpy"] | None = None
) -> NDArray[Any]: ...
@overload
def full(shape: int | Sequence[int], fill_value: Any, dtype: Any = None, *, like: T, library: None = None) -> T: ...
@overload
def full(
    shape: int | Sequence[int], fill_value: Any, dtype: Any = None, *, like: Any = None, library: str | None = None
) -> Any: ...
def full(
    shape: int | Sequence[int], fill_value: Any, dtype: Any = None, *, like: Any = None, library: str | None = None
) -> Any:
    """Return a new array whose elements are all ``fill_value`` in shared memory. See ``empty``."""
    array = empty(shape, dtype, like=like, library=library)
    array[...] = fill_value
    return array


def _library(like: Any, library: str | None) -> str:
    chosen = library or ("numpy" if like is None else making.library_of(like))
    if chosen == "jax":
        raise TypeError("JAX arrays are immutable: allocate NumPy arrays, or use procgroup.functional.")
    if chosen not in making.LIBRARIES:
        raise ValueError(f"expected `library` to be one of {', '.join(making.LIBRARIES)}, got {library!r}")
    if chosen == "torch" and "torch" not in sys.modules:
        raise ValueError('`library` is "torch", but torch has not been imported')
    return chosen
