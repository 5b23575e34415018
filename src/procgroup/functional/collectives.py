"""The functions themselves.

All raise TypeError for a leaf that is neither an array nor a number, ValueError for a group that this rank is not in,
because there is nothing to return, and CollectiveMismatch on every rank when dtypes or sizes differ between the ranks.

While JAX traces a function, for jit, grad or vmap, a call becomes a part of what is traced (``tracing``, ``traced``).
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

from procgroup.api.default_group import resolve
from procgroup.api.ranks import group_rank_of, root_or_first
from procgroup.errors import ArgumentError
from procgroup.functional import tracing
from procgroup.functional.calls import perform
from procgroup.functional.fusing import Leaves
from procgroup.functional.operations import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Operation,
    ReduceScatter,
    SendRecv,
)
from procgroup.groups import checks
from procgroup.groups.group import ProcessGroup
from procgroup.types import AnyReduceOp, ReduceOp

T = TypeVar("T")
Number = TypeVar("Number", bool, int, float, complex)


def all_reduce(tree: T, op: AnyReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> T:
    """Return each array combined, element by element, with those of the other ranks; bit-identical on all ranks.

    Python's integers are combined by Python's own operators: they do not overflow, and their AVG is a float.
    """
    return _perform(tree, AllReduce(checks.reduce_op(op)), resolve(group))


def broadcast(tree: T, src: int | None = None, group: ProcessGroup | None = None, group_src: int | None = None) -> T:
    """Return the arrays of rank ``src``, by default 0. The other ranks pass arrays of the same shapes and dtypes."""
    chosen = resolve(group)
    root = checks.group_rank(root_or_first(chosen, src, group_src), chosen.size(), chosen.group_name)
    return _perform(tree, Broadcast(root), chosen)


@overload
def all_gather(tree: Number, group: ProcessGroup | None = None) -> list[Number]: ...
@overload
def all_gather(tree: T, group: ProcessGroup | None = None) -> T: ...
def all_gather(tree: Any, group: ProcessGroup | None = None) -> Any:
    """Return, for each array, those of all ranks, stacked along a new first dimension in group-rank order.

    For a Python number it is the list of those of all ranks.
    """
    return _perform(tree, AllGather(), resolve(group))


def reduce_scatter(tree: T, op: AnyReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> T:
    """Return, for each array, element ``[rank]`` of the ranks' combined arrays.

    The first dimension has one element per rank; the result does not have it. Raises ArgumentError for another length.
    """
    return _perform(tree, ReduceScatter(checks.reduce_op(op)), resolve(group))


def all_to_all(tree: T, group: ProcessGroup | None = None) -> T:
    """Return, for each array, in place ``[r]`` what rank ``r`` has in the place of this rank.

    The first dimension has one element per rank, also in the result. Raises ArgumentError for another length.
    """
    return _perform(tree, AllToAll(), resolve(group))


def sendrecv(
    tree: T,
    dst: int | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    group_src: int | None = None,
) -> T:
    """Send the arrays to one rank and return those that another one sends, which have the same shapes and dtypes.

    ``dst`` and ``src`` are global ranks, ``group_dst`` and ``group_src`` group ranks. Both calls are in progress at
    once, so ranks may exchange in a ring. A rank may exchange with itself; raises ArgumentError for one that would only
    send to itself, or only receive from itself.
    """
    chosen = resolve(group)
    destination = checks.group_rank(group_rank_of(chosen, dst, group_dst), chosen.size(), chosen.group_name)
    source = checks.group_rank(group_rank_of(chosen, src, group_src), chosen.size(), chosen.group_name)
    if chosen.rank() in (destination, source) and destination != source:
        raise ArgumentError(
            f"functional.sendrecv on group {chosen.group_name} (rank {chosen.rank()} of {chosen.size()}): expected "
            f"group rank {chosen.rank()} as both destination and source, or as neither, got destination {destination} "
            f"and source {source}."
        )
    return _perform(tree, SendRecv(destination, source), chosen)


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until all ranks of the group call this. Inside of jax.jit, later calls of this module come after it."""
    chosen = resolve(group)
    if tracing.is_active():
        tracing.barrier(chosen)
    else:
        chosen.barrier()


def _perform(tree: T, operation: Operation, group: ProcessGroup) -> T:
    if tracing.is_active():
        traced: T = tracing.perform(tree, operation, group)
        return traced
    result: T = perform(Leaves(tree), operation, group)
    return result
