"""Calls in which every rank sends something to every other.

Ranks, ``async_op``, ``timeout`` and foreign groups are as in ``collectives``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from procgroup.api.membership import choose
from procgroup.groups.group import ProcessGroup
from procgroup.groups.work import Work
from procgroup.types import Array, Timeout


@overload
def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[Array],
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[Array],
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[Array],
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[Array],
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Send ``input_tensor_list[r]`` to each group rank ``r``; ``output_tensor_list[r]`` gets what that rank sends.

    All arrays have one dtype; the sizes may all differ, where what rank a sends to rank b is as large as what b expects
    from a. Raises ValueError unless there is one array per rank; CollectiveMismatch, changing nothing, when two ranks
    expect different sizes.
    """
    chosen = choose(group, "all_to_all")
    if chosen is None:
        return None
    return chosen.all_to_all(output_tensor_list, input_tensor_list, async_op, timeout)


@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...


@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Work: ...


@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Work | None: ...


def all_to_all_single(
    output: Array,
    input: Array,  # noqa: A002 - torch.distributed's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Work | None:
    """Send part ``r`` of ``input`` to each group rank ``r``; receive what it sends here into part ``r`` of ``output``.

    Split sizes count rows, along the first dimension; without them (None or an empty list) the parts are equal. Raises
    ArgumentError when the splits do not add up to the first dimension or are not one per rank, and without splits when
    the first dimension does not divide by the world size; CollectiveMismatch, changing nothing, when two ranks expect
    different sizes.
    """
    chosen = choose(group, "all_to_all_single")
    if chosen is None:
        return None
    return chosen.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op, timeout)
