"""Calls after which one rank, or every rank, has the arrays of all.

Ranks, ``async_op``, ``timeout`` and foreign groups are as in ``collectives``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from procgroup.api.membership import choose
from procgroup.api.roots import root_or_first
from procgroup.groups.group import ProcessGroup
from procgroup.groups.work import Work
from procgroup.types import Array, Timeout


@overload
def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None: ...


def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copy the array of each group rank ``r`` into ``gather_list[r]`` on ``dst``, global rank 0 by default.

    All arrays have the dtype and size of ``tensor``. Raises ValueError when ``gather_list`` is missing on
    ``dst``, given elsewhere or not one array per rank; on every rank CollectiveMismatch, changing nothing, when
    dtype, size or ``dst`` differ between the ranks.
    """
    chosen = choose(group, "gather")
    if chosen is None:
        return None
    return chosen.gather(tensor, gather_list, root_or_first(chosen, dst, group_dst), async_op, timeout)


@overload
def all_gather(
    tensor_list: Sequence[Array],
    tensor: Array,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def all_gather(
    tensor_list: Sequence[Array],
    tensor: Array,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def all_gather(
    tensor_list: Sequence[Array],
    tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def all_gather(
    tensor_list: Sequence[Array],
    tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copy the array of each group rank ``r`` into ``tensor_list[r]`` on every rank.

    The ranks' arrays have one dtype and may have different sizes: ``tensor_list[r]`` is as large as the array of
    rank ``r``. Raises ValueError unless there is one array per rank; on every rank CollectiveMismatch, changing
    nothing, when the sizes or dtypes do not fit.
    """
    chosen = choose(group, "all_gather")
    if chosen is None:
        return None
    return chosen.all_gather(tensor_list, tensor, async_op, timeout)


@overload
def all_gather_single(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def all_gather_single(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def all_gather_single(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def all_gather_single(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Copy the arrays of all ranks, one after the other in group order, into every rank's ``output_tensor``.

    The output has as many elements as all inputs together: for inputs of shape (n, ...) and world size w its shape
    is (w * n, ...), which concatenates them, or (w, n, ...), which stacks them. Raises ArgumentError for another
    size; on every rank CollectiveMismatch, changing nothing, when dtype or size differ between the ranks.
    """
    chosen = choose(group, "all_gather_single")
    if chosen is None:
        return None
    return chosen.all_gather_single(output_tensor, input_tensor, async_op, timeout)
