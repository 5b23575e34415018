"""The backend of a world of 1: every collective is over at once, and messages go to oneself.

It checks what the native backend checks, so that a program that works alone works on many ranks.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from procgroup.arrays.view import ArrayView, view
from procgroup.errors import CollectiveTimeout, DistError, PeerFailed
from procgroup.groups.backend import Operation
from procgroup.types import ReduceOp

_INTEGRAL_ONLY = frozenset((ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))


class Receive:
    """One receive from oneself, over when a message has come or an error has ended it."""

    def __init__(self, target: ArrayView, condition: threading.Condition) -> None:
        self.source = -1
        self.target = target
        self._condition = condition
        self._error: DistError | None = None
        self._over = False
        self._callbacks: list[Callable[[], None]] = []

    def wait(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while not self._over:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                # Waiting in slices keeps Ctrl-C working where an endless wait would not be interrupted.
                self._condition.wait(0.2 if left is None else min(left, 0.2))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over

    def exception(self) -> BaseException | None:
        return self._error

    def on_completion(self, callback: Callable[[], None]) -> None:
        with self._condition:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback()

    def finish(self, error: DistError | None = None) -> None:
        """End the receive. Call without holding the condition: callbacks run here."""
        with self._condition:
            if self._over:
                return
            self._error = error
            self.source = -1 if error else 0
            self._over = True
            self._condition.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Done:
    """An operation that was over before it was returned."""

    source = -1

    def wait(self, timeout: float | None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def on_completion(self, callback: Callable[[], None]) -> None:
        callback()


class LoopbackBackend:
    """The verbs for a group of one rank."""

    transport = "loopback"
    supports = frozenset(("all_reduce", "reduce", "broadcast", "all_gather", "barrier", "send", "recv"))

    def __init__(self, *, name: str, group_name: str, timeout: float) -> None:
        self.name = name
        self._group_name = group_name
        self._timeout = timeout
        self._sequence = 0
        self._condition = threading.Condition()
        self._sent: dict[int, deque[bytes]] = defaultdict(deque)
        self._waiting: dict[int, deque[Receive]] = defaultdict(deque)

    def all_reduce(self, array: Any, op: int, async_op: bool = False, timeout: float | None = None) -> Operation | None:
        self._check_reduction(array, op)
        return self._over(async_op)

    def reduce(
        self, array: Any, root: int, op: int, async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        self._check_reduction(array, op)
        return self._over(async_op)

    def broadcast(
        self, array: Any, root: int, async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        view(array, writable=True)
        return self._over(async_op)

    def all_gather(
        self, outputs: Sequence[Any], array: Any, async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        source = view(array)
        target = view(outputs[0], writable=True, name="tensor_list[0]")
        _check_same(source, target)
        ctypes.memmove(target.address, source.address, source.nbytes)
        return self._over(async_op)

    def barrier(self, async_op: bool = False, timeout: float | None = None) -> Operation | None:
        return self._over(async_op)

    def send(
        self, array: Any, destination: int, tag: int, async_op: bool = False, timeout: float | None = None
    ) -> Operation | None:
        source = view(array)
        message = ctypes.string_at(source.address, source.nbytes)
        with self._condition:
            receive = self._waiting[tag].popleft() if self._waiting[tag] else None
            if receive is None:
                self._sent[tag].append(message)
        if receive is not None:
            self._deliver(message, receive)
        return self._over(async_op)

    def recv(
        self, array: Any, source: int, tag: int, async_op: bool = False, timeout: float | None = None
    ) -> Operation | int:
        with self._condition:
            receive = Receive(view(array, writable=True), self._condition)
            message = self._sent[tag].popleft() if self._sent[tag] else None
            if message is None:
                self._waiting[tag].append(receive)
        if message is not None:
            self._deliver(message, receive)
        if async_op:
            return receive
        self._await(receive, tag, self._timeout if timeout is None else timeout)
        return receive.source

    def shutdown(self) -> None:
        self._end_receives("the group was destroyed")

    def abort(self) -> None:
        self._end_receives("the group was aborted")

    def _await(self, receive: Receive, tag: int, limit: float) -> None:
        try:
            if receive.wait(limit):
                return
        except KeyboardInterrupt:
            self._forget(receive, tag)
            raise
        self._forget(receive, tag)
        raise CollectiveTimeout(missing=[0], seconds=limit, **self._call("recv"))

    def _forget(self, receive: Receive, tag: int) -> None:
        with self._condition:
            if receive in self._waiting[tag]:
                self._waiting[tag].remove(receive)

    def _deliver(self, message: bytes, receive: Receive) -> None:
        if len(message) == receive.target.nbytes:
            ctypes.memmove(receive.target.address, message, len(message))
            receive.finish()
            return
        reason = f"it sent {len(message)} bytes into a receive of {receive.target.nbytes} bytes"
        receive.finish(PeerFailed(peer=0, reason=reason, **self._call("recv")))

    def _end_receives(self, reason: str) -> None:
        with self._condition:
            receives = [receive for waiting in self._waiting.values() for receive in waiting]
            self._waiting.clear()
            self._sent.clear()
        for receive in receives:
            receive.finish(PeerFailed(peer=0, reason=reason, **self._call("recv")))

    def _check_reduction(self, array: Any, op: int) -> None:
        dtype = view(array, writable=True).dtype
        floating = "float" in dtype
        if op == ReduceOp.AVG and not floating:
            raise ValueError(f"ReduceOp.AVG exists for floating-point arrays only, got dtype {dtype}.")
        if op in _INTEGRAL_ONLY and floating:
            raise ValueError(f"Cannot use ReduceOp.{ReduceOp(op).name} with non-integral dtype {dtype}.")

    def _call(self, op: str) -> dict[str, Any]:
        return {"op": op, "sequence": self._sequence, "group": self._group_name, "rank": 0, "size": 1}

    def _over(self, async_op: bool) -> Operation | None:
        self._sequence += 1
        return Done() if async_op else None


def _check_same(source: ArrayView, target: ArrayView) -> None:
    if source.dtype != target.dtype:
        raise ValueError(f"Invalid usage of tensors with different dtypes: found {source.dtype} and {target.dtype}.")
    if source.count != target.count:
        raise ValueError(f"`tensor_list[0]` has {target.count} elements; expected {source.count}, as `tensor` has.")
