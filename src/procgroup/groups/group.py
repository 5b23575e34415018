"""ProcessGroup: the ranks that talk to each other, and one of them: this one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from procgroup import types
from procgroup.errors import ForkedProcessError, GroupDestroyed
from procgroup.groups import checks, slabs
from procgroup.groups.awaiting import AwaitingCalls
from procgroup.groups.backend import FLUSH_SECONDS, Backend
from procgroup.groups.coalescing import CoalescedCalls
from procgroup.groups.collectives import Collectives
from procgroup.groups.deferring import DeferredCalls
from procgroup.groups.ended import EndedBackend
from procgroup.groups.messages import Messages
from procgroup.groups.parts import CallsOfParts
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.store import Store
from procgroup.types import Timeout


class ProcessGroup(Collectives, CoalescedCalls, DeferredCalls, AwaitingCalls, Messages, CallsOfParts):
    """The ranks that talk to each other. Ranks in its methods are group ranks; ``members`` maps them to global ranks,
    ``group_ranks`` back.

    Its calls are those of Collectives, CoalescedCalls, Messages and, for objects, CallsOfParts. The former return None
    when the call is over or, with ``async_op=True``, a Work. ``timeout`` is a timedelta or seconds; None: the group's
    own.
    """

    def __init__(
        self,
        backend: Backend,
        store: Store,
        *,
        rank: int,
        members: Sequence[int],
        group_name: str,
        timeout: timedelta,
        backend_config: str,
        group_desc: str = "",
    ) -> None:
        self._backend = backend
        self._rank = rank
        self._size = len(members)
        self._seconds = timeout.total_seconds()
        self.members: tuple[int, ...] = tuple(members)
        self.group_name = group_name
        self.group_ranks: dict[int, int] = {member: rank for rank, member in enumerate(members)}
        self.store = store
        self.group_desc = group_desc
        self.backend_config = backend_config

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self._size

    def name(self) -> str:
        """Return the backend's name, as it was asked for."""
        return self._backend.name

    def get_group_store(self) -> Store:
        """Return the store that the group's ranks share; its keys are the group's own."""
        return self.store

    @property
    def transport(self) -> str:
        """What moves the bytes: "shared memory", "tcp" or "shared memory, tcp"."""
        return self._backend.transport

    def allocate(self, nbytes: int, *, copied_by_fork: bool = False) -> Any | None:
        """Return writable memory that the ranks of this host read in place; None where the backend has none.

        It stays valid for its owner when the group is destroyed. A forked child shares it, or, with
        ``copied_by_fork``, writes into copies of its own. Raises MemoryError when the system refuses it.
        """
        allocate = getattr(self._backend, "allocate", None)
        return None if allocate is None else allocate(nbytes, copied_by_fork=copied_by_fork)

    @property
    def timeout(self) -> timedelta:
        """How long a call may take when it is not given a timeout of its own."""
        return timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long a call may take when it is not given a timeout of its own. Counts from the next call."""
        self._seconds = types.seconds(timeout)

    def global_rank(self, group_rank: int) -> int:
        """Return the global rank of a member. Raises ValueError when the group has no such rank."""
        return self.members[checks.group_rank(group_rank, self._size, self.group_name)]

    def group_rank(self, global_rank: int) -> int:
        """Return a member's rank in this group. Raises ValueError when that global rank is not a member."""
        rank = global_rank if global_rank.__class__ is int else checks.as_index(global_rank, "rank")
        if rank not in self.group_ranks:
            raise ValueError(f"Global rank {rank} is not part of group {self.group_name}, which has {self.members}.")
        return self.group_ranks[rank]

    def reduce_in_rank_order(self) -> None:
        """Promise that reductions combine in the order of the ranks; before the first call, on all ranks."""
        self._backend.reduce_in_rank_order()

    def make_subgroup(
        self,
        ranks: Sequence[int],
        *,
        op: str,
        group_name: str,
        timeout: timedelta,
        group_desc: str,
        backend: tuple[str, str] | None = None,
    ) -> ProcessGroup:
        """Make a group of some of this group's ranks, this one among them; return when every member has called it.

        ``op`` names the public function for errors, ``backend`` the new group's backend and its configuration.
        """
        name, config = backend or (self._backend.name, self.backend_config)
        seconds = timeout.total_seconds()
        made = self._backend.make_subgroup(ranks, op=op, name=name, group_name=group_name, timeout=seconds)
        store = PrefixStore(f"group/{made.identity:x}", self.store)
        store.set_timeout(timeout)
        return ProcessGroup(
            made,
            store,
            rank=list(ranks).index(self._rank),
            members=[self.members[rank] for rank in ranks],
            group_name=group_name,
            timeout=timeout,
            backend_config=config,
            group_desc=group_desc,
        )

    def shutdown(self, reason: str = "", flush: float = FLUSH_SECONDS) -> None:
        """Leave and free everything; later calls raise. Idempotent, never raises.

        What was issued is given ``flush`` seconds to end. With a ``reason``, the exception for which this rank leaves,
        ranks that wait for it raise PeerFailed with that.
        """
        self._backend.shutdown(reason, flush)
        slabs.let_go()
        if not isinstance(self._backend, EndedBackend):
            self._backend = cast(Backend, EndedBackend(self._backend, GroupDestroyed, self.group_name))

    def abort(self) -> None:
        """Make every call in progress fail at once on this rank, and tell the others. Idempotent.

        Calls of this group raise GroupBroken on this rank, and PeerFailed on the others that take part. The default
        group ends all groups of its world on this rank.
        """
        self._backend.abort()

    def fail(self, reason: str, at_once: bool) -> None:
        """Give the other ranks the exception for which this rank ends; with ``at_once`` their calls fail now."""
        self._backend.fail(reason, at_once)

    def mark_forked(self) -> None:
        """Turn this copy of the group, in a forked child, into one whose calls raise."""
        what = f"process group {self.group_name}"
        self._backend = cast(Backend, EndedBackend(self._backend, ForkedProcessError, what, keep=True))

    def is_usable(self) -> bool:
        """Tell whether the group was neither destroyed nor carried over a fork."""
        return not isinstance(self._backend, EndedBackend)

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name}: rank {self._rank} of {self._size}, {self.transport}>"
