"""Calls after which each rank has its own part of something.

Ranks, ``async_op``, ``timeout`` and foreign groups are as in ``collectives``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from procgroup.api.membership import choose
from procgroup.api.roots import root_or_first
from procgroup.groups.group import ProcessGroup
from procgroup.groups.work import Work
from procgroup.types import AnyReduceOp, Array, ReduceOp, Timeout


@overload
def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None: ...


def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copy ``scatter_list[r]`` of ``src``, global rank 0 by default, into ``tensor`` of each group rank ``r``.

    All arrays have the dtype and size of ``tensor``. Raises ValueError when ``scatter_list`` is missing on
    ``src``, given elsewhere or not one array per rank; on every rank CollectiveMismatch, changing nothing, when
    dtype, size or ``src`` differ between the ranks.
    """
    chosen = choose(group, "scatter")
    if chosen is None:
        return None
    return chosen.scatter(tensor, scatter_list, root_or_first(chosen, src, group_src), async_op, timeout)


@overload
def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Combine ``input_list[r]`` of all ranks, element by element, into ``output`` of each group rank ``r``.

    All arrays have one dtype; the sizes may differ along the list, and are the same on all ranks: ``input_list[r]``
    is as large as the output of rank ``r``. Raises ValueError unless there is one array per rank; on every rank
    CollectiveMismatch, changing nothing, when op, dtype or sizes do not fit.
    """
    chosen = choose(group, "reduce_scatter")
    if chosen is None:
        return None
    return chosen.reduce_scatter(output, input_list, op, async_op, timeout)


@overload
def reduce_scatter_single(
    output: Array,
    input: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def reduce_scatter_single(
    output: Array,
    input: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def reduce_scatter_single(
    output: Array,
    input: Array,
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def reduce_scatter_single(
    output: Array,
    input: Array,  # noqa: A002 - torch.distributed's name
    op: AnyReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Combine ``input`` of all ranks, element by element; ``output`` of each group rank ``r`` gets part ``r``.

    The input has as many elements as all outputs together, the parts one after the other: for outputs of shape
    (n, ...) and world size w its shape is (w * n, ...) or (w, n, ...). Raises ArgumentError for another size; on every
    rank CollectiveMismatch, changing nothing, when op, dtype or size differ between the ranks.
    """
    chosen = choose(group, "reduce_scatter_single")
    if chosen is None:
        return None
    return chosen.reduce_scatter_single(output, input, op, async_op, timeout)
