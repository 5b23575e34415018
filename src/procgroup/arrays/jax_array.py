"""JAX arrays, which are immutable: they are read in place or, on a device other than a CPU, by a copy."""

from __future__ import annotations

import sys
from typing import Any

from procgroup.arrays import numpy_array
from procgroup.arrays.array_view import ArrayView
from procgroup.errors import ArgumentError


def view(array: Any, writable: bool, name: str) -> ArrayView | None:
    """Describe a JAX array to be read; None for anything else."""
    jax = sys.modules["jax"]
    known: Any = getattr(jax, "Array", ())  # not there yet while another thread imports JAX
    if not isinstance(array, known):
        return None
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"`{name}` is being traced by JAX, and has no elements yet. Inside of jax.jit and JAX's other "
            f"transformations, call the functions of procgroup.functional."
        )
    if writable:
        raise ArgumentError(
            f"`{name}` is a JAX array, which is immutable, and this call writes into it. "
            f"Use procgroup.functional, whose functions return new arrays."
        )
    devices = array.devices()
    if len(devices) != 1:
        where = ", ".join(sorted(map(str, devices)))
        raise TypeError(f"`{name}` is on {where}; expected an array on one device. Pass jax.device_get({name}).")
    import numpy

    # The elements of a CPU device are not copied. From others JAX copies them when the array is there.
    return numpy_array.view(numpy.asarray(array), name)


def new(array: Any) -> Any:
    """Return a JAX array of a NumPy array that is not written afterwards: without a copy where JAX allows it."""
    return sys.modules["jax"].numpy.asarray(array)
