"""Collectives that copy arrays from rank to rank, and barriers.

``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` group ranks.

Each returns None when the call has completed or, with ``async_op=True``, a Work. ``timeout`` is a timedelta or
seconds; None means that of ``with timeout(...)`` or else the group's: see procgroup.timeouts. A rank that is not in the
group is warned, and nothing happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from procgroup.api.default_group import Group, choose
from procgroup.api.ranks import DESTINATION, group_rank_of, root_or_first
from procgroup.errors import CollectiveTimeout, OperationError, PeerFailed
from procgroup.groups.collectives import Limit, No, Yes
from procgroup.types import Array, Arrays

if TYPE_CHECKING:
    from procgroup._native import Work


@overload
def barrier(
    group: Group = None, async_op: No = False, device_ids: Sequence[int] | None = None, timeout: Limit = None
) -> None: ...
@overload
def barrier(
    group: Group = None, async_op: Yes = ..., device_ids: Sequence[int] | None = None, timeout: Limit = None
) -> Work: ...
@overload
def barrier(
    group: Group = None, async_op: bool = ..., device_ids: Sequence[int] | None = None, timeout: Limit = None
) -> Work | None: ...
def barrier(
    group: Group = None, async_op: bool = False, device_ids: Sequence[int] | None = None, timeout: Limit = None
) -> Work | None:
    """Wait until every rank has come here. ``device_ids`` means nothing on CPUs."""
    chosen = choose(group, "barrier")
    if chosen is None:
        return None
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise TypeError("Invalid function argument: device_ids type should be List[int]")
    return chosen.barrier(async_op, timeout)


def monitored_barrier(group: Group = None, timeout: Limit = None, wait_all_ranks: bool = False) -> None:
    """Wait until every rank has come here; otherwise raise CollectiveTimeout, whose ``missing`` names who did not.

    Every rank that waits raises it with all missing ranks, whichever rank's deadline passes first, so
    ``wait_all_ranks`` changes nothing. A rank that comes too late
    learns of it in its next call at the latest. Raises PeerLost at once when a rank's process ended. ``timeout`` is a
    timedelta or seconds; None: see procgroup.timeouts.
    """
    chosen = choose(group, "monitored_barrier")
    if chosen is None:
        return
    try:
        chosen.barrier(False, timeout)
    except CollectiveTimeout as error:
        raise _timed_out(error, error.missing, error.seconds) from None
    except PeerFailed as error:
        if error.cause != "timeout":
            raise
        raise _timed_out(error, error.missing, error.seconds) from None


@overload
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: No = False,
    group_src: int | None = None,
    timeout: Limit = None,
) -> None: ...
@overload
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: Yes = ...,
    group_src: int | None = None,
    timeout: Limit = None,
) -> Work: ...
@overload
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: bool = ...,
    group_src: int | None = None,
    timeout: Limit = None,
) -> Work | None: ...
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Limit = None,
) -> Work | None:
    """Copy the array of ``src`` into every rank's ``tensor``."""
    chosen = choose(group, "broadcast")
    if chosen is None:
        return None
    return chosen.broadcast(tensor, group_rank_of(chosen, src, group_src), async_op, timeout)


@overload
def gather(
    tensor: Array,
    gather_list: Arrays | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: No = False,
    group_dst: int | None = None,
    timeout: Limit = None,
) -> None: ...
@overload
def gather(
    tensor: Array,
    gather_list: Arrays | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: Yes = ...,
    group_dst: int | None = None,
    timeout: Limit = None,
) -> Work: ...
@overload
def gather(
    tensor: Array,
    gather_list: Arrays | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = ...,
    group_dst: int | None = None,
    timeout: Limit = None,
) -> Work | None: ...
def gather(
    tensor: Array,
    gather_list: Arrays | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    timeout: Limit = None,
) -> Work | None:
    """Copy the array of each group rank ``r`` into ``gather_list[r]`` on ``dst``, global rank 0 by default.

    All arrays have the dtype and size of ``tensor``. Raises ValueError when ``gather_list`` is missing on
    ``dst``, given elsewhere or not one array per rank; on every rank CollectiveMismatch, changing nothing, when
    dtype, size or ``dst`` differ between the ranks: after a small call others than ``dst`` raise it in a later one.
    """
    chosen = choose(group, "gather")
    if chosen is None:
        return None
    return chosen.gather(tensor, gather_list, root_or_first(chosen, dst, group_dst, DESTINATION), async_op, timeout)


@overload
def scatter(
    tensor: Array,
    scatter_list: Arrays | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: No = False,
    group_src: int | None = None,
    timeout: Limit = None,
) -> None: ...
@overload
def scatter(
    tensor: Array,
    scatter_list: Arrays | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: Yes = ...,
    group_src: int | None = None,
    timeout: Limit = None,
) -> Work: ...
@overload
def scatter(
    tensor: Array,
    scatter_list: Arrays | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = ...,
    group_src: int | None = None,
    timeout: Limit = None,
) -> Work | None: ...
def scatter(
    tensor: Array,
    scatter_list: Arrays | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Limit = None,
) -> Work | None:
    """Copy ``scatter_list[r]`` of ``src``, global rank 0 by default, into ``tensor`` of each group rank ``r``.

    All arrays have the dtype and size of ``tensor``. Raises ValueError when ``scatter_list`` is missing on
    ``src``, given elsewhere or not one array per rank; on every rank CollectiveMismatch, changing nothing, when
    dtype, size or ``src`` differ between the ranks: after a small call ``src`` raises it in a later one, and so do
    ranks that agree with ``src`` and have their part.
    """
    chosen = choose(group, "scatter")
    if chosen is None:
        return None
    return chosen.scatter(tensor, scatter_list, root_or_first(chosen, src, group_src), async_op, timeout)


@overload
def all_gather(
    tensor_list: Arrays, tensor: Array, group: Group = None, async_op: No = False, timeout: Limit = None
) -> None: ...
@overload
def all_gather(
    tensor_list: Arrays, tensor: Array, group: Group = None, async_op: Yes = ..., timeout: Limit = None
) -> Work: ...
@overload
def all_gather(
    tensor_list: Arrays, tensor: Array, group: Group = None, async_op: bool = ..., timeout: Limit = None
) -> Work | None: ...
def all_gather(
    tensor_list: Arrays, tensor: Array, group: Group = None, async_op: bool = False, timeout: Limit = None
) -> Work | None:
    """Copy the array of each group rank ``r`` into ``tensor_list[r]`` on every rank.

    The ranks' arrays have one dtype and may have different sizes: ``tensor_list[r]`` is as large as the array of
    rank ``r``. Raises ValueError unless there is one array per rank; on every rank CollectiveMismatch, changing
    nothing, when the sizes or dtypes do not fit.
    """
    chosen = choose(group, "all_gather")
    return None if chosen is None else chosen.all_gather(tensor_list, tensor, async_op, timeout)


@overload
def all_gather_single(
    output_tensor: Array, input_tensor: Array, group: Group = None, async_op: No = False, timeout: Limit = None
) -> None: ...
@overload
def all_gather_single(
    output_tensor: Array, input_tensor: Array, group: Group = None, async_op: Yes = ..., timeout: Limit = None
) -> Work: ...
@overload
def all_gather_single(
    output_tensor: Array, input_tensor: Array, group: Group = None, async_op: bool = ..., timeout: Limit = None
) -> Work | None: ...
def all_gather_single(
    output_tensor: Array, input_tensor: Array, group: Group = None, async_op: bool = False, timeout: Limit = None
) -> Work | None:
    """Copy the arrays of all ranks, one after the other in group order, into every rank's ``output_tensor``.

    The output has as many elements as all inputs together: for inputs of shape (n, ...) and world size w its shape
    is (w * n, ...), which concatenates them, or (w, n, ...), which stacks them. Raises ArgumentError for another
    size; on every rank CollectiveMismatch, changing nothing, when dtype or size differ between the ranks.
    """
    chosen = choose(group, "all_gather_single")
    return None if chosen is None else chosen.all_gather_single(output_tensor, input_tensor, async_op, timeout)


@overload
def all_to_all(
    output_tensor_list: Arrays,
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: No = False,
    timeout: Limit = None,
) -> None: ...
@overload
def all_to_all(
    output_tensor_list: Arrays,
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: Yes = ...,
    timeout: Limit = None,
) -> Work: ...
@overload
def all_to_all(
    output_tensor_list: Arrays,
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: bool = ...,
    timeout: Limit = None,
) -> Work | None: ...
def all_to_all(
    output_tensor_list: Arrays,
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: bool = False,
    timeout: Limit = None,
) -> Work | None:
    """Send ``input_tensor_list[r]`` to each group rank ``r``; ``output_tensor_list[r]`` gets what that rank sends.

    All arrays have one dtype; the sizes may all differ, where what rank a sends to rank b is as large as what b expects
    from a. Raises ValueError unless there is one array per rank; CollectiveMismatch, changing nothing, when two ranks
    expect different sizes.
    """
    chosen = choose(group, "all_to_all")
    return None if chosen is None else chosen.all_to_all(output_tensor_list, input_tensor_list, async_op, timeout)


@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: No = False,
    timeout: Limit = None,
) -> None: ...
@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: Yes = ...,
    timeout: Limit = None,
) -> Work: ...
@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = ...,
    timeout: Limit = None,
) -> Work | None: ...
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: Limit = None,
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


def _timed_out(error: OperationError, missing: tuple[int, ...], seconds: float) -> CollectiveTimeout:
    return CollectiveTimeout(
        missing=missing,
        seconds=seconds,
        op="monitored_barrier",
        sequence=error.sequence,
        group=error.group,
        rank=error.rank,
        size=error.size,
        members=error.members,
        calls=getattr(error, "calls", None),
    )
