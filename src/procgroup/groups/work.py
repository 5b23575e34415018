"""Work: the handle of one asynchronous call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from procgroup import types
from procgroup.errors import WaitTimeout
from procgroup.groups.engine import Operation
from procgroup.groups.future import Future


class Place(Protocol):
    """The group that a call was issued on."""

    members: tuple[int, ...]

    def _where(self) -> str: ...


class Work:
    """A call that was issued with ``async_op=True``. Do not use its arrays before ``wait`` returns."""

    __slots__ = ("_arrays", "_future", "_operation", "_place", "op")

    def __init__(self, operation: Operation, op: str, arrays: list[Any], place: Place) -> None:
        self.op: str = op
        self._operation = operation
        self._arrays = arrays
        self._place = place
        self._future: Future | None = None

    def wait(self, timeout: types.Timeout | None = None) -> bool:
        """Wait until the call has completed and return True.

        ``timeout`` is a timedelta or seconds; None or zero means the call's own deadline. Raises the
        call's error if it failed, and WaitTimeout if ``timeout`` passed first: the call then goes on.
        """
        limit = None if timeout is None else types.seconds(timeout) or None
        if not self._operation.wait(limit):
            raise WaitTimeout(op=self.op, where=self._place._where(), seconds=limit or 0.0)
        return True

    def is_completed(self) -> bool:
        """Return whether the call has completed, with or without an error. Does not wait."""
        return self._operation.is_completed()

    def is_success(self) -> bool:
        """Return whether the call has completed without an error."""
        return self._operation.is_completed() and self._operation.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a failed call; None while it runs and when it succeeded."""
        return self._operation.exception()

    def result(self) -> list[Any]:
        """Return the call's arrays. Raises RuntimeError while it runs, and its error if it failed."""
        if not self._operation.is_completed():
            raise RuntimeError(f"{self.op} on {self._place._where()} has not completed; call wait() before result().")
        error = self._operation.exception()
        if error is not None:
            raise error
        return self._arrays

    def get_future(self) -> Future:
        """Return a future of ``result()``, completed by a thread of the backend. Cancelling it has no effect.

        It has the methods of ``torch.futures.Future`` and of ``concurrent.futures.Future``.
        """
        if self._future is None:
            self._future = Future()
            self._future.set_running_or_notify_cancel()
            self._operation.on_completion(self._complete_future)
        return self._future

    def synchronize(self) -> None:
        """Wait until the call has completed, as ``wait()`` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait until the call has completed: on CPUs the calling thread is the stream."""
        self.wait()

    def source_rank(self) -> int:
        """Return the global rank of the sender of a completed receive.

        Raises RuntimeError for other calls.
        """
        if self.op != "recv":
            raise RuntimeError(
                "sourceRank() may only be called on work objects that correspond to a recv or recv-from-any call."
            )
        self.result()
        return self._place.members[self._operation.source]

    def _source_rank(self) -> int:
        return self.source_rank()

    def _complete_future(self) -> None:
        assert self._future is not None
        error = self._operation.exception()
        if error is None:
            self._future.set_result(self._arrays)
        else:
            self._future.set_exception(error)

    def __repr__(self) -> str:
        state = "running" if not self.is_completed() else "complete" if self.is_success() else "failed"
        return f"<Work {self.op} on {self._place._where()}: {state}>"


class JoinedOperation:
    """Several operations as one: completed when all are, failed when one is."""

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
        """Call ``callback`` when the last operation has completed. One callback at most."""

        def complete_one() -> None:
            with self._lock:
                self._running -= 1
                is_last = self._running == 0
            if is_last:
                callback()

        for operation in self._operations:
            operation.on_completion(complete_one)
