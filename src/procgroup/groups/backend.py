"""What a process group asks of a backend.

A backend moves bytes between the ranks of one group. Ranks here are group ranks, the reduce op is
data, arrays are whatever the backend's door takes, timeouts are seconds.
Arguments go by position, which is the fastest way into native code. Every verb returns None when the
call is over, or, with ``async_op``, an ``Operation``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from procgroup.types import AnyReduceOp

FLUSH_SECONDS = 30.0
"""How long a rank that leaves in order lets what it has issued end. Ranks that are gone are not waited for."""


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


COLLECTIVES = (
    "broadcast",
    "reduce",
    "all_reduce",
    "scan",
    "exscan",
    "gather",
    "all_gather",
    "all_gather_single",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)
VERBS = (*COLLECTIVES, "all_reduce_coalesced", "send", "recv")
"""The methods of a Backend that move data."""


class Backend(Protocol):
    """The verbs that a process group needs."""

    name: str
    """The name that get_backend returns."""
    transport: str
    """What moves the bytes: "shared memory", "tcp" or "shared memory, tcp"."""
    identity: int
    """What names the group on all its members, and no other group of theirs; 0 for the world."""

    def broadcast(self, array: Any, root: int, async_op: bool, timeout: float, /) -> Operation | None: ...

    def reduce(self, array: Any, root: int, op: AnyReduceOp, async_op: bool, timeout: float, /) -> Operation | None: ...

    def all_reduce(self, array: Any, op: AnyReduceOp, async_op: bool, timeout: float, /) -> Operation | None: ...

    def scan(self, array: Any, op: AnyReduceOp, async_op: bool, timeout: float, /) -> Operation | None: ...

    def exscan(self, array: Any, op: AnyReduceOp, async_op: bool, timeout: float, /) -> Operation | None: ...

    def all_reduce_coalesced(
        self, arrays: Sequence[Any], ops: Sequence[AnyReduceOp], async_op: bool, timeout: float, /
    ) -> list[Operation] | None:
        """Reduce each of the arrays with its op, in as few calls as is fast, once all are found good."""
        ...

    def gather(
        self, array: Any, outputs: Sequence[Any] | None, root: int, async_op: bool, timeout: float, /
    ) -> Operation | None:
        """``outputs``: one array per rank on the root, None elsewhere."""
        ...

    def all_gather(self, outputs: Sequence[Any], array: Any, async_op: bool, timeout: float, /) -> Operation | None:
        """The outputs may have different sizes, the same on all ranks: output r is as large as the array of rank r."""
        ...

    def all_gather_single(self, output: Any, array: Any, async_op: bool, timeout: float, /) -> Operation | None:
        """``output`` holds the arrays of all ranks one after the other."""
        ...

    def scatter(
        self, array: Any, inputs: Sequence[Any] | None, root: int, async_op: bool, timeout: float, /
    ) -> Operation | None:
        """``inputs``: one array per rank on the root, None elsewhere."""
        ...

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], op: AnyReduceOp, async_op: bool, timeout: float, /
    ) -> Operation | None:
        """The inputs may have different sizes, the same on all ranks: input r is as large as the output of rank r."""
        ...

    def reduce_scatter_single(
        self, output: Any, array: Any, op: AnyReduceOp, async_op: bool, timeout: float, /
    ) -> Operation | None:
        """``array`` holds what each rank gets one after the other."""
        ...

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], async_op: bool, timeout: float, /
    ) -> Operation | None:
        """Input s goes to rank s, output r comes from rank r. Sizes are compared by pair before a byte is written."""
        ...

    def all_to_all_single(
        self,
        output: Any,
        array: Any,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        async_op: bool,
        timeout: float,
        /,
    ) -> Operation | None:
        """Splits count rows, along the first dimension; None: equal parts."""
        ...

    def barrier(self, async_op: bool, timeout: float, /) -> Operation | None: ...

    def send(self, array: Any, destination: int, tag: int, async_op: bool, timeout: float, /) -> Operation | None: ...

    def recv(self, array: Any, source: int, tag: int, async_op: bool, timeout: float, /) -> Operation | int:
        """Receive from group rank ``source``, or from any rank with -1. Blocking: return the sender's group rank."""
        ...

    def check(self, verb: str, /, *arguments: Any) -> None:
        """Raise what a verb would raise for these arguments, those up to ``async_op``; do nothing else.

        So that of several calls all are checked before the first is issued.
        """
        ...

    def reduce_in_rank_order(self) -> None:
        """Promise that reductions combine in the order of the ranks; the default group: in groups made later too.

        Called before the first call, on all ranks; where one did not, calls do not match.
        """
        ...

    def make_subgroup(self, ranks: Sequence[int], *, op: str, name: str, group_name: str, timeout: float) -> Backend:
        """Make a group of some of these ranks, this one among them, in this order; return when every member does.

        ``op`` names the public function for errors, whose ranks are global ones. ``timeout`` is for the making.
        """
        ...

    def shutdown(self, reason: str = "", flush: float = FLUSH_SECONDS) -> None:
        """Leave: let what was issued end for at most ``flush`` seconds, free everything. Idempotent, never raises.

        With a ``reason``, the exception for which this rank leaves, ranks that wait for it raise PeerFailed with that.
        """
        ...

    def fail(self, reason: str, at_once: bool) -> None:
        """Give the other ranks the exception for which this rank ends; with ``at_once`` their calls fail now."""
        ...

    def abort(self) -> None:
        """Make every call in progress fail at once on this rank, and tell the others. Idempotent."""
        ...
