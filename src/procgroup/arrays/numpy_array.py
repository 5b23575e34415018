"""NumPy arrays, and what others give out as such."""

from __future__ import annotations

import functools
import sys
from typing import Any

from procgroup.arrays.array_view import ArrayView
from procgroup.errors import ArgumentError


def view(array: Any, name: str) -> ArrayView:
    """Describe a NumPy array. Raises TypeError for a masked one, ArgumentError for one in another byte order."""
    # While another thread imports a library, the library is in sys.modules and has no classes, nor arrays, yet.
    if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
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
