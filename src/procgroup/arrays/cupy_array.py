"""CuPy arrays: they are in GPU memory, which no transport can access."""

from __future__ import annotations

import sys
from typing import Any

from procgroup.arrays.array_view import ArrayView


def view(array: Any, writable: bool, name: str) -> ArrayView | None:
    """Refuse a CuPy array; None for anything else."""
    known: Any = getattr(sys.modules["cupy"], "ndarray", ())  # not there yet while another thread imports CuPy
    if not isinstance(array, known):
        return None
    raise TypeError(
        f"`{name}` is on CUDA device {array.device.id}, and this group moves arrays in CPU memory. "
        f"Pass {name}.get(), and copy the result back with {name}.set()."
    )
