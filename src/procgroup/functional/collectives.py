"""The functions themselves.

All raise TypeError for a leaf that is neither an array nor a number, ValueError for a group that this rank is not in,
because there is nothing to return, and CollectiveMismatch on every rank when dtypes or sizes differ between the ranks.

While JAX traces a function, for jit, grad or vmap, a call becomes a part of what is traced (``tracing``, ``traced``).
"""

from __future__ import annotations

from typing import Any, TypeVar, cast, overload

from procgroup.api.default_group import resolve
from procgroup.api.ranks import DESTINATION, group_rank_of, root_or_first
from procgroup.errors import ArgumentError
from procgroup.functional import numbers, tracing
from procgroup.functional.calls import perform
from procgroup.functional.fusing import Leaves
from procgroup.functional.operations import (
    TAG,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    FunctionalOperation,
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
    chosen = resolve(group)
    if op.__class__ is not ReduceOp or op is ReduceOp.PREMUL_SUM:
        op = checks.reduce_op(op)
    found = _quick(chosen, "all_reduce", tree, op=op)
    return _perform(tree, AllReduce(op), chosen) if found is NotImplemented else found


def broadcast(tree: T, src: int | None = None, group: ProcessGroup | None = None, group_src: int | None = None) -> T:
    """Return the arrays of rank ``src``, by default 0. The other ranks pass arrays of the same shapes and dtypes."""
    chosen = resolve(group)
    root = checks.group_rank(root_or_first(chosen, src, group_src), chosen.size(), chosen.group_name)
    found = _quick(chosen, "broadcast", tree, root)
    return _perform(tree, Broadcast(root), chosen) if found is NotImplemented else found


@overload
def all_gather(tree: Number, group: ProcessGroup | None = None) -> list[Number]: ...
@overload
def all_gather(tree: T, group: ProcessGroup | None = None) -> T: ...
def all_gather(tree: Any, group: ProcessGroup | None = None) -> Any:
    """Return, for each array, those of all ranks, stacked along a new first dimension in group-rank order.

    For a Python number it is the list of those of all ranks.
    """
    chosen = resolve(group)
    found = _quick(chosen, "all_gather", tree)
    return _perform(tree, AllGather(), chosen) if found is NotImplemented else found


def reduce_scatter(tree: T, op: AnyReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> T:
    """Return, for each array, element ``[rank]`` of the ranks' combined arrays.

    The first dimension has one element per rank; the result does not have it. Raises ArgumentError for another length.
    """
    chosen = resolve(group)
    if op.__class__ is not ReduceOp or op is ReduceOp.PREMUL_SUM:
        op = checks.reduce_op(op)
    found = _quick(chosen, "reduce_scatter", tree, op=op)
    return _perform(tree, ReduceScatter(op), chosen) if found is NotImplemented else found


def all_to_all(tree: T, group: ProcessGroup | None = None) -> T:
    """Return, for each array, in place ``[r]`` what rank ``r`` has in the place of this rank.

    The first dimension has one element per rank, also in the result. Raises ArgumentError for another length.
    """
    chosen = resolve(group)
    found = _quick(chosen, "all_to_all", tree)
    return _perform(tree, AllToAll(), chosen) if found is NotImplemented else found


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
    has_global_ranks = group_dst is None and group_src is None
    if has_global_ranks and not tracing.is_active():
        found = chosen.calls.try_sendrecv(tree, dst, src, TAG)
        if found is not NotImplemented:
            return cast(T, found)
    destination = checks.group_rank(
        group_rank_of(chosen, dst, group_dst, DESTINATION), chosen.size(), chosen.group_name
    )
    source = checks.group_rank(group_rank_of(chosen, src, group_src), chosen.size(), chosen.group_name)
    if chosen.rank() in (destination, source) and destination != source:
        raise ArgumentError(
            f"functional.sendrecv on group {chosen.group_name} (rank {chosen.rank()} of {chosen.size()}): expected "
            f"group rank {chosen.rank()} as both destination and source, or as neither, got destination {destination} "
            f"and source {source}."
        )
    found = NotImplemented if has_global_ranks else _quick(chosen, "send", tree, destination, source)
    return _perform(tree, SendRecv(destination, source), chosen) if found is NotImplemented else found


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until all ranks of the group call this. Inside of jax.jit, later calls of this module come after it."""
    chosen = resolve(group)
    if tracing.is_active():
        tracing.barrier(chosen)
    else:
        chosen.barrier()


def _quick(
    group: ProcessGroup, name: str, tree: Any, root: int = -1, source: int = -1, op: AnyReduceOp | None = None
) -> Any:
    """Return the results for numbers and NumPy's arrays, made natively; NotImplemented for all else."""
    if tracing.is_active():
        return NotImplemented
    return group.calls.functional(name, tree, root, source, op, numbers.combine, TAG)


def _perform(tree: T, operation: FunctionalOperation, group: ProcessGroup) -> T:
    if tracing.is_active():
        traced: T = tracing.perform(tree, operation, group)
        return traced
    result: T = perform(Leaves(tree), operation, group)
    return result
