"""Collectives that return new arrays, of the library that was given, and leave their arguments alone.

They take one array or number, or a tree of them (nested dicts, lists, tuples and, where JAX is imported, whatever JAX
knows as a tree), and return the same tree. The leaves of one dtype go through one call together. Every rank passes a
tree of the same form. Inside of jax.jit, jax.grad and JAX's other transformations they are part of the function, and
differentiable where the mathematics is; torch's autograd does not see them.
"""

from procgroup.functional.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
    sendrecv,
)
from procgroup.functional.tracing import jit_errors

__all__ = ["all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "jit_errors", "reduce_scatter", "sendrecv"]
