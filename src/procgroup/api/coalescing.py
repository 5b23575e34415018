"""Several collectives as one: the calls that take lists of arrays, and the manager that collects calls.

Reductions of small arrays are combined into one call. All other arrays are sent in one call each, in order. So every
rank must pass the same number of arrays in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

from procgroup.api.default_group import Group, choose, resolve
from procgroup.api.reductions import SUM
from procgroup.groups import checks
from procgroup.groups.future import Future
from procgroup.process.timeouts import timeout as context_of
from procgroup.types import AnyReduceOp, Array, Arrays, Timeout

if TYPE_CHECKING:
    from procgroup._native import Work


@overload
def all_reduce_coalesced(
    tensors: Arrays | Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...
@overload
def all_reduce_coalesced(
    tensors: Arrays | Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Future: ...
@overload
def all_reduce_coalesced(
    tensors: Arrays | Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Future | None: ...
def all_reduce_coalesced(
    tensors: Arrays | Array,
    op: AnyReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Future | None:
    """Combine each array of the list, element by element, with those of all ranks at the same place.

    All have one dtype, and each has the same size on all ranks. Returns, with ``async_op=True``, a Future of the
    arrays; raises what ``all_reduce`` raises. Unlike torch.distributed, procgroup does not deprecate it.
    """
    chosen = choose(group, "all_reduce_coalesced")
    if chosen is None:
        return None
    arrays: Sequence[Any] = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    checks.same_dtype(arrays)
    return _future(chosen.all_reduce_coalesced(arrays, op, async_op, timeout), async_op)


@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Arrays],
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: Literal[False] = False,
    timeout: Timeout | None = None,
) -> None: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Arrays],
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = None,
) -> Future: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Arrays],
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: bool = ...,
    timeout: Timeout | None = None,
) -> Future | None: ...
def all_gather_coalesced(
    output_tensor_lists: Sequence[Arrays],
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Future | None:
    """Copy array ``i`` of each group rank ``r`` into ``output_tensor_lists[r][i]`` on every rank.

    Returns, with ``async_op=True``, a Future of the outputs. Raises TypeError and ValueError for lists that do not fit,
    and what ``all_gather`` raises.
    """
    chosen = choose(group, "all_gather_coalesced")
    if chosen is None:
        return None
    if not isinstance(output_tensor_lists, (list, tuple)):
        raise TypeError(
            f"Invalid function argument: output_tensor_lists should be a list, got {type(output_tensor_lists).__name__}"
        )
    checks.array_list(
        input_tensor_list, len(input_tensor_list), "input_tensor_list", "all_gather_coalesced", chosen.rank()
    )
    checks.same_dtype(input_tensor_list)
    return _future(chosen.all_gather_coalesced(output_tensor_lists, input_tensor_list, async_op, timeout), async_op)


class _CoalescingManager:
    """The object that ``_coalescing_manager`` yields; with ``async_ops=True`` it holds the Work to wait for."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def append(self, work: Work | None = None) -> None:
        """Add a Work to those that ``wait`` waits for."""
        if work is not None:
            self.works.append(work)

    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait for every Work, for at most ``timeout`` each: a timedelta or seconds, as for ``Work.wait``."""
        for work in self.works:
            work.wait(timeout)


@contextmanager
def _coalescing_manager(
    group: Group = None, device: Any = None, async_ops: bool = False, timeout: Timeout | None = None
) -> Iterator[_CoalescingManager]:
    """Queue each all_reduce, all_gather_single and reduce_scatter_single; issue them together at the end.

    All calls must be of one kind; otherwise RuntimeError is raised. Inside they return None or, with ``async_op=True``,
    a Work whose methods raise ValueError. Nothing is issued when the block raises. ``device`` has no effect.
    ``timeout`` applies to calls without a ``timeout=``. A call that reduces several arrays has the longest of their
    timeouts.
    """
    chosen = resolve(group)
    manager = _CoalescingManager()
    queue = chosen.start_coalescing()
    try:
        with nullcontext() if timeout is None else context_of(timeout):
            yield manager
    finally:
        chosen.stop_coalescing()
    manager.append(chosen.issue_queued(queue, async_ops))


def _future(work: Work | None, async_op: bool) -> Future | None:
    if work is not None:
        return work.get_future()
    if not async_op:
        return None
    nothing_to_do = Future()
    nothing_to_do.set_result([])
    return nothing_to_do
