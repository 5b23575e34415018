"""What a process group asks of the engine of its rank: to issue calls, to make groups, and to leave.

``calls`` is the native group, where every call of every group enters: see native/bindings/python_group.hpp. What it
does for a call (number it, record it, agree on it with the other ranks, watch its deadline and who lives) it does
whatever moves the bytes: the engine's own transport, or a backend (groups/backend.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from procgroup import _native

FLUSH_SECONDS = 30.0
"""How long a rank that leaves in order lets what it has issued end. Ranks that are gone are not waited for."""

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
VERBS = (*COLLECTIVES, "all_reduce_coalesced", "send", "recv", "broadcast_iovecs", "all_gather_iovecs")
"""The methods of the native group that move data. Arguments go by position, which is the fastest way into native code;
the last two are ``async_op`` and the timeout in seconds (of the iovecs' only that)."""


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
        """Call ``callback`` once, from a thread of the engine, when the call is over."""
        ...


class GroupEngine(Protocol):
    """One group on the engine of this rank."""

    name: str
    """The name that get_backend returns."""
    transport: str
    """What moves the bytes: "shared memory", "tcp" or "shared memory, tcp"."""
    identity: int
    """What names the group on all its members, and no other group of theirs; 0 for the world."""
    calls: _native.Group
    """Issues calls. Its verbs return None when the call is over or, with ``async_op``, an Operation."""

    def make_subgroup(
        self, ranks: Sequence[int], *, op: str, name: str, group_name: str, timeout: float
    ) -> GroupEngine:
        """Make a group of some of these ranks, this one among them, in this order; return when every member does.

        ``op`` names the public function for errors, whose ranks are global ones. ``timeout`` is for the making.
        """
        ...

    def reduce_in_rank_order(self) -> None:
        """Promise that reductions combine in the order of the ranks; the default group: in groups made later too.

        Called before the first call, on all ranks; where one did not, calls do not match.
        """
        ...

    def records(self) -> list[dict[str, Any]]:
        """Return the last calls of this rank, in whatever group, oldest first."""
        ...

    def allocate(self, nbytes: int, *, copied_by_fork: bool = False) -> Any | None:
        """Return writable memory that the other ranks of this host read in place; None where there is none."""
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
