"""What a process group asks of a backend.

A backend moves bytes between the ranks of one group. Ranks here are group ranks, the reduce op is
data, arrays are whatever the backend's door takes, timeouts are seconds.
Arguments go by position, which is the fastest way into native code. Every verb returns None when the
call is over, or, with ``async_op``, an ``Operation``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Operation(Protocol):
    """One call that was issued and may still be running."""

    @property
    def source(self) -> int:
        """For a receive that is over: the group rank that the message came from; otherwise -1."""
        ...

    def wait(self, timeout: float | None) -> bool:
        """Wait until the call is over; raise what made it fail. False when ``timeout`` seconds passed first."""
        ...

    def is_completed(self) -> bool:
        """Tell whether the call is over, well or badly, without waiting."""
        ...

    def exception(self) -> BaseException | None:
        """Return what made the call fail; None while it runs and when it went well."""
        ...

    def on_completion(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, from a thread of the backend, when the call is over."""
        ...


class Backend(Protocol):
    """The verbs that a process group needs."""

    name: str
    """The name that get_backend returns."""
    transport: str
    """What moves the bytes: "shared memory", "tcp", "loopback"."""
    supports: frozenset[str]
    """The names of the verbs below that work."""

    def all_reduce(self, array: Any, op: int, async_op: bool, timeout: float, /) -> Operation | None: ...

    def reduce(self, array: Any, root: int, op: int, async_op: bool, timeout: float, /) -> Operation | None: ...

    def broadcast(self, array: Any, root: int, async_op: bool, timeout: float, /) -> Operation | None: ...

    def all_gather(self, outputs: Sequence[Any], array: Any, async_op: bool, timeout: float, /) -> Operation | None: ...

    def barrier(self, async_op: bool, timeout: float, /) -> Operation | None: ...

    def send(self, array: Any, destination: int, tag: int, async_op: bool, timeout: float, /) -> Operation | None: ...

    def recv(self, array: Any, source: int, tag: int, async_op: bool, timeout: float, /) -> Operation | int:
        """Receive from group rank ``source``, or from any rank with -1. Blocking: return the sender's group rank."""
        ...

    def shutdown(self) -> None:
        """Leave in order: flush what was sent, say goodbye, free everything. Idempotent, never raises."""
        ...

    def abort(self) -> None:
        """Make every call in progress fail at once on this rank, and tell the others. Idempotent."""
        ...
