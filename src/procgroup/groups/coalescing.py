"""Several calls issued as one.

While a group coalesces, its backend's place is taken by one that queues what can be coalesced and passes
everything else on: so a group that does not pays nothing for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, cast, overload

from procgroup import types
from procgroup.errors import GroupBroken
from procgroup.groups import checks
from procgroup.groups.backend import Backend, Operation
from procgroup.groups.calls import GroupCalls
from procgroup.groups.work import Work
from procgroup.types import AnyReduceOp, Array, ReduceOp, Timeout


class QueuedCall(NamedTuple):
    """One call of a verb, with its arguments up to ``async_op``."""

    verb: str
    arguments: tuple[Any, ...]
    timeout: float


class CoalescingBackend:
    """A backend that queues all_reduce, all_gather_single and reduce_scatter_single."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.queued: list[QueuedCall] = []

    def all_reduce(self, array: Array, op: AnyReduceOp, async_op: bool, timeout: float) -> Operation | None:
        return self._queue(async_op, QueuedCall("all_reduce", (array, op), timeout))

    def all_gather_single(self, output: Array, array: Array, async_op: bool, timeout: float) -> Operation | None:
        return self._queue(async_op, QueuedCall("all_gather_single", (output, array), timeout))

    def reduce_scatter_single(
        self, output: Array, array: Array, op: AnyReduceOp, async_op: bool, timeout: float
    ) -> Operation | None:
        return self._queue(async_op, QueuedCall("reduce_scatter_single", (output, array, op), timeout))

    def _queue(self, async_op: bool, call: QueuedCall) -> Operation | None:
        self.queued.append(call)
        return QueuedOperation() if async_op else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


class QueuedOperation:
    """Stands for a call that is not issued yet: the manager's ``wait`` is the one to call."""

    source = -1

    def wait(self, timeout: float | None) -> bool:
        self._refuse("wait")

    def is_completed(self) -> bool:
        self._refuse("is_completed")

    def exception(self) -> BaseException | None:
        self._refuse("exception")

    def on_completion(self, callback: Callable[[], None]) -> None:
        self._refuse("get_future")

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(
            f"Illegal to call {name} on IllegalWork object: the call is issued when the coalescing manager ends. "
            "Call wait() of the manager instead."
        )


class JoinedOperation:
    """Several operations as one: over when all are, failed when one is."""

    source = -1

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._lock = threading.Lock()
        self._running = len(operations)

    def wait(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            operation.wait(None if deadline is None else max(deadline - time.monotonic(), 1e-6))
            for operation in self._operations
        )

    def is_completed(self) -> bool:
        return all(operation.is_completed() for operation in self._operations)

    def exception(self) -> BaseException | None:
        errors = (operation.exception() for operation in self._operations)
        return next((error for error in errors if error is not None), None)

    def on_completion(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the last operation is over. One callback at most."""

        def one_is_over() -> None:
            with self._lock:
                self._running -= 1
                is_last = self._running == 0
            if is_last:
                callback()

        for operation in self._operations:
            operation.on_completion(one_is_over)


class CoalescedCalls(GroupCalls):
    """Calls that take several arrays. All ranks give as many, in the same order."""

    @overload
    def all_reduce_coalesced(
        self,
        arrays: Sequence[Array],
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: Literal[False] = False,
        timeout: Timeout | None = None,
    ) -> None: ...

    @overload
    def all_reduce_coalesced(
        self,
        arrays: Sequence[Array],
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = None,
    ) -> Work: ...

    @overload
    def all_reduce_coalesced(
        self,
        arrays: Sequence[Array],
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = ...,
        timeout: Timeout | None = None,
    ) -> Work | None: ...

    def all_reduce_coalesced(
        self,
        arrays: Sequence[Array],
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Combine each of the arrays with those of all ranks at the same place in the list."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        seconds = self._seconds if timeout is None else types.seconds(timeout)
        return self._reduce_all(arrays, [op] * len(arrays), seconds, async_op)

    @overload
    def all_gather_coalesced(
        self,
        output_lists: Sequence[Sequence[Array]],
        arrays: Sequence[Array],
        async_op: Literal[False] = False,
        timeout: Timeout | None = None,
    ) -> None: ...

    @overload
    def all_gather_coalesced(
        self,
        output_lists: Sequence[Sequence[Array]],
        arrays: Sequence[Array],
        async_op: Literal[True] = ...,
        timeout: Timeout | None = None,
    ) -> Work: ...

    @overload
    def all_gather_coalesced(
        self,
        output_lists: Sequence[Sequence[Array]],
        arrays: Sequence[Array],
        async_op: bool = ...,
        timeout: Timeout | None = None,
    ) -> Work | None: ...

    def all_gather_coalesced(
        self,
        output_lists: Sequence[Sequence[Array]],
        arrays: Sequence[Array],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copy array ``i`` of each rank ``r`` into ``output_lists[r][i]`` on every rank."""
        call = "output_tensor_lists", "all_gather_coalesced", self._rank
        output_lists = checks.array_list(output_lists, self._size, *call)
        for outputs in output_lists:
            checks.array_list(outputs, len(arrays), *call, "input")
        seconds = self._seconds if timeout is None else types.seconds(timeout)
        calls = [
            QueuedCall("all_gather", ([outputs[place] for outputs in output_lists], array), seconds)
            for place, array in enumerate(arrays)
        ]
        return self._issue(calls, [array for outputs in output_lists for array in outputs], async_op)

    @overload
    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Array],
        arrays: Sequence[Array],
        async_op: Literal[False] = False,
        timeout: Timeout | None = None,
    ) -> None: ...

    @overload
    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Array],
        arrays: Sequence[Array],
        async_op: Literal[True] = ...,
        timeout: Timeout | None = None,
    ) -> Work: ...

    @overload
    def all_gather_single_coalesced(
        self, outputs: Sequence[Array], arrays: Sequence[Array], async_op: bool = ..., timeout: Timeout | None = None
    ) -> Work | None: ...

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Array],
        arrays: Sequence[Array],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copy array ``i`` of all ranks, one after the other, into every rank's ``outputs[i]``."""
        checks.array_list(outputs, len(arrays), "outputs", "all_gather_single_coalesced", self._rank, "input")
        seconds = self._seconds if timeout is None else types.seconds(timeout)
        pairs = zip(outputs, arrays, strict=True)
        return self._issue([QueuedCall("all_gather_single", pair, seconds) for pair in pairs], outputs, async_op)

    @overload
    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Array],
        arrays: Sequence[Array],
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: Literal[False] = False,
        timeout: Timeout | None = None,
    ) -> None: ...

    @overload
    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Array],
        arrays: Sequence[Array],
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: Literal[True] = ...,
        timeout: Timeout | None = None,
    ) -> Work: ...

    @overload
    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Array],
        arrays: Sequence[Array],
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = ...,
        timeout: Timeout | None = None,
    ) -> Work | None: ...

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Array],
        arrays: Sequence[Array],
        op: AnyReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Combine array ``i`` of all ranks; part ``r`` of the result goes to ``outputs[i]`` of rank ``r``."""
        if op.__class__ is not ReduceOp:
            op = checks.reduce_op(op)
        checks.array_list(outputs, len(arrays), "outputs", "reduce_scatter_single_coalesced", self._rank, "input")
        seconds = self._seconds if timeout is None else types.seconds(timeout)
        calls = [
            QueuedCall("reduce_scatter_single", (output, array, op), seconds)
            for output, array in zip(outputs, arrays, strict=True)
        ]
        return self._issue(calls, outputs, async_op)

    def start_coalescing(self) -> CoalescingBackend:
        """Queue what can be coalesced from now on. Raises ValueError when the group coalesces already."""
        if isinstance(self._backend, CoalescingBackend):
            raise ValueError("ProcessGroup has non-empty op list at the start of coalescing")
        coalescing = CoalescingBackend(self._backend)
        self._backend = cast(Backend, coalescing)
        return coalescing

    def stop_coalescing(self, coalescing: CoalescingBackend) -> None:
        """Issue calls at once again; what is queued stays queued."""
        if self._backend is coalescing:  # otherwise the group has ended meanwhile
            self._backend = coalescing.backend

    @overload
    def issue_queued(self, coalescing: CoalescingBackend, async_op: Literal[False] = False) -> None: ...

    @overload
    def issue_queued(self, coalescing: CoalescingBackend, async_op: Literal[True] = ...) -> Work: ...

    @overload
    def issue_queued(self, coalescing: CoalescingBackend, async_op: bool = ...) -> Work | None: ...

    def issue_queued(self, coalescing: CoalescingBackend, async_op: bool = False) -> Work | None:
        """Issue what was queued. Raises RuntimeError when the calls are of different kinds."""
        kinds = {call.verb for call in coalescing.queued}
        if len(kinds) > 1:
            raise RuntimeError(
                "Coalescing manager requires all collectives to be the same type, "
                f"but got mixed types: {', '.join(sorted(kinds))}"
            )
        results = [call.arguments[0] for call in coalescing.queued]
        if kinds == {"all_reduce"}:
            ops = [call.arguments[1] for call in coalescing.queued]
            return self._reduce_all(results, ops, max(call.timeout for call in coalescing.queued), async_op)
        return self._issue(coalescing.queued, results, async_op)

    def _reduce_all(
        self, arrays: Sequence[Array], ops: Sequence[AnyReduceOp], seconds: float, async_op: bool
    ) -> Work | None:
        if not ops:
            return None
        operations = self._backend.all_reduce_coalesced(arrays, ops, async_op, seconds)
        return None if operations is None else self._join(operations, "all_reduce", arrays)

    def _issue(self, calls: Sequence[QueuedCall], results: Sequence[Any], async_op: bool) -> Work | None:
        """Issue the calls once all are found good: where one is bad, no other rank has seen any of them."""
        for call in calls if len(calls) > 1 else ():
            self._backend.check(call.verb, *call.arguments)
        operations: list[Any] = []
        for call in calls:
            try:
                operations.append(getattr(self._backend, call.verb)(*call.arguments, async_op, call.timeout))
            except GroupBroken:
                first = JoinedOperation([operation for operation in operations if operation is not None]).exception()
                if first is None:
                    raise
                raise first from None  # what ended the group
        return self._join(operations, calls[0].verb, results) if async_op and calls else None

    def _join(self, operations: Sequence[Operation], verb: str, results: Sequence[Any]) -> Work:
        return self._work(JoinedOperation(operations), f"{verb}_coalesced", results)
