"""Calls that every rank of a group makes.

``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` group ranks.

Each returns None when the call is over or, with ``async_op=True``, a Work. ``timeout`` is a timedelta or
seconds; None means the group's own. A rank that is not in the group is warned, and nothing happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from procgroup.api.default import SLOT
from procgroup.api.membership import choose
from procgroup.api.roots import group_rank_of
from procgroup.groups.group import ProcessGroup
from procgroup.groups.work import Work
from procgroup.types import AnyReduceOp, Array, ReduceOp, Timeout


@overload
def all_reduce(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def all_reduce(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def all_reduce(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def all_reduce(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Combine the arrays of all ranks, element by element, into every rank's ``tensor``; bit-identical on all ranks.

    Elements are combined in rank order where all ranks share memory or none do; in groups that span hosts, first those
    of each host, unless the group was made with ``deterministic="order"``. 16-bit floats are combined in float32.
    Raises CollectiveMismatch on every rank, changing nothing, when op, dtype or count differ.
    """
    # The shortest way for the most frequent call: the default group, without another frame.
    chosen = SLOT.get().group if group is None else None
    if chosen is None:
        chosen = choose(group, "all_reduce")
        if chosen is None:
            return None
    return chosen.all_reduce(tensor, op, async_op, timeout)


@overload
def scan(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def scan(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def scan(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def scan(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Combine the arrays of the ranks up to this one, element by element, into this rank's ``tensor``.

    The inclusive prefix reduction, as MPI_Scan (MPI 4.1, section 6.11.1): rank r gets tensor_0 op ... op tensor_r, in
    rank order whatever the layout; AVG divides by r + 1. Raises CollectiveMismatch on every rank, changing nothing,
    when op, dtype or count differ.
    """
    chosen = choose(group, "scan")
    return None if chosen is None else chosen.scan(tensor, op, async_op, timeout)


@overload
def exscan(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def exscan(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def exscan(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def exscan(
    tensor: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Combine the arrays of the ranks below this one, element by element, into this rank's ``tensor``.

    The exclusive prefix reduction, as MPI_Exscan (MPI 4.1, section 6.11.2): rank r gets tensor_0 op ... op tensor_r-1,
    in rank order; AVG divides by r. No rank is below rank 0: its ``tensor`` keeps its values. Raises as ``scan`` does.
    """
    chosen = choose(group, "exscan")
    return None if chosen is None else chosen.exscan(tensor, op, async_op, timeout)


@overload
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None: ...


def reduce(
    tensor: Array,
    dst: int | None = None,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Combine the arrays of all ranks into that of ``dst``; the other ranks' arrays keep their values."""
    chosen = choose(group, "reduce")
    if chosen is None:
        return None
    return chosen.reduce(tensor, group_rank_of(chosen, dst, group_dst), op, async_op, timeout)


@overload
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None: ...


def broadcast(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copy the array of ``src`` into every rank's ``tensor``."""
    chosen = choose(group, "broadcast")
    if chosen is None:
        return None
    return chosen.broadcast(tensor, group_rank_of(chosen, src, group_src), async_op, timeout)


@overload
def barrier(
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def barrier(
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
) -> Work | None: ...


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Wait until every rank has come here. ``device_ids`` means nothing on CPUs."""
    chosen = choose(group, "barrier")
    if chosen is None:
        return None
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise TypeError("Invalid function argument: device_ids type should be List[int]")
    return chosen.barrier(async_op, timeout)
