"""The interface between a process group and the engine of its rank.

``calls`` is the native group, where every call of every group enters: see native/bindings/python_group.hpp. It numbers
and records each call, agrees on it with the other ranks, and watches its deadline and the other ranks' lives, whether
the engine's own transport moves the bytes or a backend does (groups/backend.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from procgroup import _native
    from procgroup.process.exit_reason import ExitReason


FLUSH_SECONDS = 30.0
"""How long a rank that leaves in order waits for its issued calls to complete. It does not wait for lost ranks."""


class GroupEngine(Protocol):
    """One group on the engine of this rank."""

    name: str
    """The name that get_backend returns."""
    transport: str
    """The transports in use: "shared memory", "tcp" or "shared memory, tcp"."""
    identity: int
    """A number that identifies the group on all its members; 0 for the world."""
    members: tuple[int, ...]
    """The ranks of the world that are in it."""
    calls: _native.Group
    """Issues calls. Its methods return None when the call has completed or, with ``async_op``, a Work."""

    def make_subgroup(
        self, ranks: Sequence[int], *, op: str, name: str, group_name: str, timeout: float
    ) -> GroupEngine:
        """Make a group of some of these ranks, in this order; return when every member has called it.

        ``op`` names the public function for errors, whose ranks are global ones. ``timeout`` is for the making.
        """
        ...

    def shrink(self, excluded: Collection[int], *, name: str, group_name: str, timeout: float) -> GroupEngine:
        """Make a group of the ranks that live, without those excluded; return when each of them has called it.

        A rank that is lost meanwhile is left out, too. ``members`` of what is returned tells who is in it.
        """
        ...

    def reduce_in_rank_order(self) -> None:
        """Make reductions combine in the order of the ranks; on the default group, in groups made later, too.

        All ranks call it before the first call; otherwise their calls do not match.
        """
        ...

    def records(self) -> list[dict[str, Any]]:
        """Return the last calls of this rank in all groups, oldest first."""
        ...

    def allocate(self, nbytes: int, *, copied_by_fork: bool = False) -> Any | None:
        """Return writable memory that the other ranks of this host read in place; None where there is none."""
        ...

    def shutdown(self, reason: ExitReason | None = None, flush: float = FLUSH_SECONDS) -> None:
        """Leave: wait at most ``flush`` seconds for issued calls, and free everything. Idempotent, never raises.

        With a ``reason``, the exception that ends this rank, ranks that wait for this one raise PeerFailed with it.
        """
        ...

    def fail(self, reason: ExitReason, at_once: bool) -> None:
        """Report the exception that ends this rank to the other ranks; with ``at_once`` their calls fail now."""
        ...

    def abort(self) -> None:
        """Make every call in progress fail at once on this rank, and notify the others. Idempotent."""
        ...
