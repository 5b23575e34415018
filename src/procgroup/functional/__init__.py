"""Collectives that return new arrays, of the library that was given, and leave their arguments alone.

They take one array or a tree of arrays (nested dicts, lists, tuples and, where JAX is imported, whatever JAX knows as
a tree) and return the same tree. The leaves of one dtype go through one call together. Every rank passes a tree of the
same form. They are no part of a graph: neither torch's autograd nor a JAX transformation sees them.
"""

from procgroup.functional.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]
