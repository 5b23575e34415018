"""Collectives that combine the arrays of the ranks, element by element.

Ranks, ``async_op``, ``timeout`` and foreign groups are as in ``collectives``. With ``retain``, a call that fails leaves
``tensor`` as it was, so that it can be made again, for instance after ``shrink_group``: the call works on a copy, in
host memory. Calls on arrays that NCCL moves raise ArgumentError, because NCCL works in the array itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from procgroup.api.default_group import Group, choose, slot
from procgroup.api.ranks import DESTINATION, group_rank_of
from procgroup.groups.collectives import Limit, No, Yes
from procgroup.types import AnyReduceOp, Array, Arrays, ReduceOp

if TYPE_CHECKING:
    from procgroup._native import Work

SUM = ReduceOp.SUM


@overload
def all_reduce(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: No = False,
    timeout: Limit = None,
    retain: bool = False,
) -> None: ...
@overload
def all_reduce(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: Yes = ...,
    timeout: Limit = None,
    retain: bool = False,
) -> Work: ...
@overload
def all_reduce(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = ...,
    timeout: Limit = None,
    retain: bool = False,
) -> Work | None: ...
def all_reduce(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Limit = None,
    retain: bool = False,
) -> Work | None:
    """Combine the arrays of all ranks, element by element, into every rank's ``tensor``; bit-identical on all ranks.

    Elements are combined in rank order where all ranks share memory or none do; in groups that span hosts, first those
    of each host, unless the group was made with ``deterministic="order"``. 16-bit floats are combined in float32.
    Raises CollectiveMismatch on every rank, changing nothing, when op, dtype or count differ.
    """
    # The shortest way for the most frequent call: the default group, without another frame.
    chosen = slot().group if group is None else None
    if chosen is None:
        chosen = choose(group, "all_reduce")
        if chosen is None:
            return None
    return chosen.all_reduce(tensor, op, async_op, timeout, retain)


@overload
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: No = False,
    group_dst: int | None = None,
    timeout: Limit = None,
    retain: bool = False,
) -> None: ...
@overload
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: Yes = ...,
    group_dst: int | None = None,
    timeout: Limit = None,
    retain: bool = False,
) -> Work: ...
@overload
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = ...,
    group_dst: int | None = None,
    timeout: Limit = None,
    retain: bool = False,
) -> Work | None: ...
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    timeout: Limit = None,
    retain: bool = False,
) -> Work | None:
    """Combine the arrays of all ranks into that of ``dst``; the other ranks' arrays keep their values."""
    chosen = choose(group, "reduce")
    if chosen is None:
        return None
    return chosen.reduce(tensor, group_rank_of(chosen, dst, group_dst, DESTINATION), op, async_op, timeout, retain)


@overload
def reduce_scatter(
    output: Array,
    input_list: Arrays,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: No = False,
    timeout: Limit = None,
) -> None: ...
@overload
def reduce_scatter(
    output: Array,
    input_list: Arrays,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: Yes = ...,
    timeout: Limit = None,
) -> Work: ...
@overload
def reduce_scatter(
    output: Array,
    input_list: Arrays,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = ...,
    timeout: Limit = None,
) -> Work | None: ...
def reduce_scatter(
    output: Array,
    input_list: Arrays,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Limit = None,
) -> Work | None:
    """Combine ``input_list[r]`` of all ranks, element by element, into ``output`` of each group rank ``r``.

    All arrays have one dtype; the sizes may differ along the list, and are the same on all ranks: ``input_list[r]``
    is as large as the output of rank ``r``. Raises ValueError unless there is one array per rank; on every rank
    CollectiveMismatch, changing nothing, when op, dtype or sizes do not fit.
    """
    chosen = choose(group, "reduce_scatter")
    return None if chosen is None else chosen.reduce_scatter(output, input_list, op, async_op, timeout)


@overload
def reduce_scatter_single(
    output: Array, input: Array, op: AnyReduceOp = SUM, group: Group = None, async_op: No = False, timeout: Limit = None
) -> None: ...
@overload
def reduce_scatter_single(
    output: Array, input: Array, op: AnyReduceOp = SUM, group: Group = None, async_op: Yes = ..., timeout: Limit = None
) -> Work: ...
@overload
def reduce_scatter_single(
    output: Array, input: Array, op: AnyReduceOp = SUM, group: Group = None, async_op: bool = ..., timeout: Limit = None
) -> Work | None: ...
def reduce_scatter_single(
    output: Array,
    input: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Limit = None,
) -> Work | None:
    """Combine ``input`` of all ranks, element by element; ``output`` of each group rank ``r`` gets part ``r``.

    The input has as many elements as all outputs together, the parts one after the other: for outputs of shape
    (n, ...) and world size w its shape is (w * n, ...) or (w, n, ...). Raises ArgumentError for another size; on every
    rank CollectiveMismatch, changing nothing, when op, dtype or size differ between the ranks.
    """
    chosen = choose(group, "reduce_scatter_single")
    return None if chosen is None else chosen.reduce_scatter_single(output, input, op, async_op, timeout)


@overload
def scan(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: No = False,
    timeout: Limit = None,
    retain: bool = False,
) -> None: ...
@overload
def scan(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: Yes = ...,
    timeout: Limit = None,
    retain: bool = False,
) -> Work: ...
@overload
def scan(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = ...,
    timeout: Limit = None,
    retain: bool = False,
) -> Work | None: ...
def scan(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Limit = None,
    retain: bool = False,
) -> Work | None:
    """Combine the arrays of the ranks up to this one, element by element, into this rank's ``tensor``.

    The inclusive prefix reduction, as MPI_Scan (MPI 4.1, section 6.11.1): rank r gets tensor_0 op ... op tensor_r, in
    rank order whatever the layout; AVG divides by r + 1. Raises CollectiveMismatch on every rank, changing nothing,
    when op, dtype or count differ.
    """
    chosen = choose(group, "scan")
    return None if chosen is None else chosen.scan(tensor, op, async_op, timeout, retain)


@overload
def exscan(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: No = False,
    timeout: Limit = None,
    retain: bool = False,
) -> None: ...
@overload
def exscan(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: Yes = ...,
    timeout: Limit = None,
    retain: bool = False,
) -> Work: ...
@overload
def exscan(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = ...,
    timeout: Limit = None,
    retain: bool = False,
) -> Work | None: ...
def exscan(
    tensor: Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Limit = None,
    retain: bool = False,
) -> Work | None:
    """Combine the arrays of the ranks below into ``tensor``, which is the input, too; rank 0's keeps its values.

    The exclusive prefix reduction, as MPI_Exscan (MPI 4.1, section 6.11.2): rank r gets tensor_0 op ... op tensor_r-1,
    in rank order; AVG divides by r. Every rank passes its own input, rank 0 too: zeros there would leave it out of all
    sums. So begin with a copy, and clear rank 0's afterwards: ``before = x.copy(); exscan(before)``, then
    ``if rank == 0: before[...] = 0``. Raises as ``scan`` does.
    """
    chosen = choose(group, "exscan")
    return None if chosen is None else chosen.exscan(tensor, op, async_op, timeout, retain)
