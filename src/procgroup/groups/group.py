"""ProcessGroup: a group of ranks, how it starts and ends, and the states in which its calls wait or are refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from procgroup import types
from procgroup.errors import DistError, ForkedProcessError, GroupDestroyed, PeerFailed, PeerLost
from procgroup.groups import checks, receive_pool
from procgroup.groups.backend import AnyBackend, MakeBackends, NativeBackend, no_backends, use
from procgroup.groups.calls import GroupCalls
from procgroup.groups.engine import FLUSH_SECONDS, GroupEngine
from procgroup.groups.issue import Deferral, Hook, Issue, QueuedCall, QueuedWork
from procgroup.process import log
from procgroup.process.exit_reason import ExitReason
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.store import Store
from procgroup.types import Timeout

if TYPE_CHECKING:
    from procgroup import _native

MoveStore = Callable[[GroupEngine, int, Store, timedelta], Store]
"""From a group's engine, this rank in it, the store that its ranks have had, and the time for it, to a store that all
of them reach."""

# The least time for another attempt to make a smaller group.
_LEAST_SECONDS = 0.5


class ProcessGroup(GroupCalls):
    """A process group, as seen from one rank.

    Ranks in its methods are group ranks; ``members`` maps them to global ranks, ``group_ranks`` back. GroupCalls has
    its communication methods.
    """

    def __init__(
        self,
        engine: GroupEngine,
        store: Store,
        *,
        rank: int,
        members: Sequence[int],
        group_name: str,
        timeout: timedelta,
        backend_config: str,
        group_desc: str = "",
        make_backends: MakeBackends = no_backends,
        store_ends_with: int | None = None,
        may_shrink: bool = False,
    ) -> None:
        """``store_ends_with`` is the rank of the world in whose process the store is. Where the group ``may_shrink``,
        an error leaves its engine to another group of those ranks that live."""
        self.engine = engine
        self.calls: _native.Group = engine.calls
        self._rank = rank
        self._size = len(members)
        self._seconds = timeout.total_seconds()
        self.calls.set_timeout(self._seconds)
        self.members: tuple[int, ...] = tuple(members)
        self.group_name = group_name
        self.group_ranks: dict[int, int] = {member: rank for rank, member in enumerate(members)}
        self.store = store
        self.group_desc = group_desc
        self.backend_config = backend_config
        self._make_backends = make_backends
        self._store_ends_with = store_ends_with
        self.new_ranks: tuple[int, ...] = ()
        """The global ranks whose processes took the place of lost ones when the group was made."""
        self.backends: Mapping[str, AnyBackend] = {}
        try:
            self.backends = make_backends(store, rank, self._size, timeout)
            for device, backend in self.backends.items():
                if device == "cpu" or isinstance(backend, NativeBackend):
                    use(backend, self.name(), self.calls, self._where(), self._seconds)
        except BaseException:  # the other members have this group already, and would wait for this rank
            if may_shrink:
                self.calls.abort()
            else:
                engine.abort()
                engine.shutdown(None, 0.0)
            for backend in self.backends.values():
                self._close_backend(backend, failed=True)
            raise
        self.takes_iovecs: bool = "cpu" not in self.backends
        self._issue = Issue(engine.calls.direct(), self._where())

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self._size

    def name(self) -> str:
        """Return the backend's name, as given when the group was made."""
        return self.engine.name

    def get_group_store(self) -> Store:
        """Return the store of the group's ranks; its keys belong to this group alone."""
        return self.store

    @property
    def transport(self) -> str:
        """The transports in use: "shared memory", "tcp" or "shared memory, tcp"."""
        return self.engine.transport

    def allocate(self, nbytes: int, *, copied_by_fork: bool = False) -> Any | None:
        """Return writable memory that the ranks of this host read in place; None where the backend has none.

        None, too, once the group has ended; earlier memory stays valid for its owner. A forked child shares the memory
        or, with ``copied_by_fork``, writes into copies. Raises MemoryError when the system refuses it.
        """
        return self.engine.allocate(nbytes, copied_by_fork=copied_by_fork) if self.is_usable() else None

    def records(self) -> list[dict[str, Any]]:
        """Return the last calls of this rank in all groups, oldest first.

        Each has op, sequence, call, state, started_ns and ended_ns: on the monotonic clock, 0 while the call runs.
        Raises ForkedProcessError in a forked child.
        """
        return self.engine.records()

    @property
    def timeout(self) -> timedelta:
        """The timeout of calls without a timeout of their own."""
        return types.as_timedelta(self._seconds)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of calls without a timeout of their own, from the next call on."""
        self._seconds = types.seconds(timeout)
        self.calls.set_timeout(self._seconds)

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
        """Make reductions combine in the order of the ranks. All ranks call it before the first call."""
        self.engine.reduce_in_rank_order()

    def make_subgroup(
        self,
        ranks: Sequence[int],
        *,
        op: str,
        group_name: str,
        timeout: timedelta,
        group_desc: str,
        start_timeout: timedelta | None = None,
        backend: tuple[str, str, MakeBackends] | None = None,
    ) -> ProcessGroup:
        """Make a group of some of this group's ranks; return when every member has called it.

        ``timeout`` is that of its calls, and ``start_timeout`` limits the wait for the other members, by default the
        same. ``op`` names the public function for errors. ``backend`` is the new group's backend name, configuration
        and factory of backends, by default this group's.
        """
        self._issue.require_open()
        self._issue.wait_for_turn("make_subgroup")
        name, config, make_backends = backend or (self.engine.name, self.backend_config, self._make_backends)
        seconds = (timeout if start_timeout is None else start_timeout).total_seconds()
        made = self.engine.make_subgroup(ranks, op=op, name=name, group_name=group_name, timeout=seconds)
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
            make_backends=make_backends,
            store_ends_with=self._store_ends_with,
        )

    def shrink(
        self, excluded: Collection[int], *, group_name: str, timeout: timedelta, renumber: bool, move_store: MoveStore
    ) -> ProcessGroup:
        """End this group's calls on all members, and make a group of those that live, without those excluded.

        Return when each of them has called it. This group's calls then raise GroupDestroyed. ``renumber`` makes the
        members' global ranks their ranks in the new group. ``move_store`` returns a store in place of one that has
        ended with a rank, or may end with one that is left out.
        """
        self._issue.require_open()
        if self._issue.deferral is not None:
            self._issue.deferral.is_aborted = True
        self.calls.abort()
        deadline = time.monotonic() + timeout.total_seconds()
        engine = self.engine
        while True:
            seconds = max(deadline - time.monotonic(), _LEAST_SECONDS)
            made = engine.shrink(excluded, name=self.engine.name, group_name=group_name, timeout=seconds)
            try:
                shrunk = self._over(made, group_name, timedelta(seconds=seconds), renumber, move_store)
                break
            except (PeerLost, PeerFailed):
                # Another rank was lost. Those for which the group was made by then shrink it when their calls fail.
                if time.monotonic() >= deadline:
                    raise
                made.calls.abort()
                engine, excluded = made, ()
        name = self.group_name
        self._close(lambda: GroupDestroyed(name))
        for backend in self.backends.values():
            self._close_backend(backend, True)
        return shrunk

    def _over(
        self, engine: GroupEngine, group_name: str, timeout: timedelta, renumber: bool, move_store: MoveStore
    ) -> ProcessGroup:
        """Return the group of those members of this one that the engine is of."""
        world = {member: rank for rank, member in enumerate(self.engine.members)}
        members = [self.members[world[member]] for member in engine.members]
        rank = members.index(self.members[self._rank])
        has_store = self._store_ends_with is None or self._store_ends_with in engine.members
        whole = self.store if has_store else move_store(engine, rank, self.store, timeout)
        store = PrefixStore(f"group/{engine.identity:x}", whole)
        store.set_timeout(timeout)
        return ProcessGroup(
            engine,
            store,
            rank=rank,
            members=range(len(members)) if renumber else members,
            group_name=group_name,
            timeout=timedelta(seconds=self._seconds),
            backend_config=self.backend_config,
            group_desc=self.group_desc,
            make_backends=self._make_backends,
            store_ends_with=self._store_ends_with,
            may_shrink=True,
        )

    def shutdown(self, reason: ExitReason | None = None, flush: float = FLUSH_SECONDS) -> BaseException | None:
        """Leave and free everything; later calls raise. Idempotent, never raises.

        Issued calls have ``flush`` seconds to complete. With a ``reason``, the exception that ends this rank, ranks
        that wait for this one raise PeerFailed with it. Return the error of a call that returned before it failed, as
        those on GPUs do, where no later call has raised it.
        """
        if not self.is_usable():
            return None
        if self._issue.deferral is not None:
            if flush > 0:
                self._issue.deferral.wait_until_issued()
            else:
                self._issue.deferral.is_aborted = True
        failed = self.calls.is_broken or self.calls.has_lost_member
        self.engine.shutdown(reason, flush)
        receive_pool.clear()
        name = self.group_name
        self._close(lambda: GroupDestroyed(name))
        for backend in self.backends.values():
            self._close_backend(backend, failed)
        return self.calls.take_unraised()

    def abort(self) -> None:
        """Make every call in progress fail at once on this rank, and notify the others. Idempotent.

        Calls of this group raise GroupBroken on this rank, and PeerFailed on the other members. The default
        group ends all groups of its world on this rank.
        """
        if not self.is_usable():
            return
        if self._issue.deferral is not None:
            self._issue.deferral.is_aborted = True
        self.engine.abort()

    def fail(self, reason: ExitReason, at_once: bool) -> None:
        """Report the exception that ends this rank to the other ranks; with ``at_once`` their calls fail now."""
        if self.is_usable():
            self.engine.fail(reason, at_once)

    def lost(self) -> tuple[int, int, str, str] | None:
        """Return the rank by whose end the group broke, as ``process_end.Lost`` has it; None where that is not so."""
        return self.calls.lost if self.is_usable() else None

    def mark_forked(self) -> None:
        """Make the calls of this copy of the group, in a forked child, raise."""
        name = self.group_name
        self._close(lambda: ForkedProcessError(f"process group {name}"))

    def is_usable(self) -> bool:
        """Return whether the group was neither destroyed nor copied by a fork."""
        return self._issue.closed is None

    # --- states in which calls are intercepted: see groups/issue.py ---

    def start_coalescing(self) -> list[QueuedCall]:
        """Queue the calls that can be coalesced from now on. Raises ValueError when the group coalesces already."""
        if self._issue.queue is not None:
            raise ValueError("ProcessGroup has non-empty op list at the start of coalescing")
        self._issue.require_open()
        queue: list[QueuedCall] = []
        self._issue.queue = queue
        self._intercept()
        return queue

    def stop_coalescing(self) -> None:
        """Issue calls at once again; queued calls stay queued."""
        self._issue.queue = None
        self._intercept()

    def require_results_at_once(self, call: str) -> None:
        """Raise ValueError while the group coalesces calls: what this one returns would not be there yet."""
        if self._issue.queue is not None:
            raise ValueError(
                f"{call} on {self._where()} returns its result, and inside of _coalescing_manager calls are issued "
                "when the block ends. Make the call outside of it, or call dist.all_reduce and its like inside."
            )

    def deferring(self) -> Deferral:
        """Return the Deferral of this group. Raises the error of the group's calls when the group has ended."""
        self._issue.require_open()
        if self._issue.queue is not None:
            raise ValueError(f"a call on {self._where()} cannot be deferred while the group coalesces calls")
        if self._issue.deferral is None:
            self._issue.deferral = Deferral()
            self._intercept()
        return self._issue.deferral

    def await_before_calls(self, await_others: Callable[[], object]) -> None:
        """Call ``await_others`` before each call, except in ``inside_awaited_call``. Does nothing the second time.

        From then on no wait of this process counts as part of a deadlock: those calls may end the wait of another rank.
        """
        if self._issue.await_others is None:
            self.calls.allow_unknown_threads()
            self._issue.await_others = await_others
            self._intercept()

    def await_others(self) -> None:
        """Wait until the calls of ``await_before_calls`` have completed, with or without an error."""
        if self._issue.await_others is not None and self.is_usable():
            with suppress(Exception):  # the thread that started them raises it
                self._issue.await_others()

    def add_hook(self, hook: Hook) -> Callable[[], None]:
        """Call ``hook`` before each call, with the operation's name and arguments; return a function that removes it.

        If the hook returns a function, that is called when the call has been issued, with the exception that the call
        raised or None. A hook sees the calls of this rank only, and must not make calls of the group.
        """
        self._issue.hooks.append(hook)
        self._intercept()

        def remove() -> None:
            if hook in self._issue.hooks:
                self._issue.hooks.remove(hook)
                self._intercept()

        return remove

    def _intercept(self) -> None:
        self.calls.intercept(self._issue if self._issue.is_needed else None, self._issue.only_awaits)
        if self._issue.queue is not None:
            self.calls.queue_in(self._issue.queue, QueuedWork())

    def _close(self, error: Callable[[], DistError]) -> None:
        """Let every call raise ``error()``, which must not refer to the group: the engine would keep it alive."""
        self._issue.close(error)
        self._intercept()

    def _close_backend(self, backend: AnyBackend, failed: bool) -> None:
        try:
            backend.close(failed)
        except Exception as error:  # a group that is destroyed raises nothing
            what = f"{type(backend).__name__}.close() raised {type(error).__name__}: {error}"
            log.error(f"{what} ({self._where()})", self.members[self._rank])

    def _where(self) -> str:
        return f"group {self.group_name} (rank {self._rank} of {self._size})"

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name}: rank {self._rank} of {self._size}, {self.transport}>"
