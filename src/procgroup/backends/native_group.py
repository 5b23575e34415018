"""Groups of ranks that are connected already: they share one engine, its memory and its connections.

To make such a group takes no store and one short message between every two members, on any backend.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from procgroup import _native
from procgroup.errors import CollectiveMismatch, OperationError, PeerFailed, PeerLost
from procgroup.groups.engine import FLUSH_SECONDS, GroupEngine
from procgroup.process.exit_reason import ExitReason
from procgroup.process.process_end import note_failure, wait_for_others

_IDLE_SLICE_SECONDS = 0.01
_MAX_CALLS = 8
_UNFINISHED = ("started", "queued")


def identity_of(parent: int, members: Sequence[int], count: int) -> int:
    """Return the 64 bits that identify a group on all its members; never 0."""
    text = f"{parent:016x}\0{list(members)}\0{count}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") | 1


def world_identity(group_name: str, members: Sequence[int]) -> int:
    """Return the 64 bits that identify the group of all ranks, equal on all of them."""
    text = f"{group_name}\0{list(members)}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def transport_between(hosts: Sequence[int]) -> str:
    """Return the transports between ranks, given the host of each."""
    count = len(set(hosts))
    return "shared memory" if count == 1 else "tcp" if count == len(hosts) else "shared memory, tcp"


def calls_in_progress(engine: _native.Engine) -> str:
    """Return the calls of this rank that have not completed, or who has yet to receive what it sent, for a message."""
    calls = [f"{call['call']} (#{call['sequence']})" for call in engine.records() if call["state"] in _UNFINISHED]
    receivers = [f"rank {rank}" for rank in engine.unsent_to]
    return ", ".join(calls[-_MAX_CALLS:]) or f"{', '.join(receivers) or 'the receivers'} to take what was sent"


class Subgroups:
    """Makes the groups of one engine. Threads may make groups concurrently."""

    def __init__(
        self, engine: _native.Engine, hosts: Sequence[int], world_name: str, global_ranks: Sequence[int] | None = None
    ) -> None:
        self._engine = engine
        self._global_ranks = global_ranks
        self._hosts = hosts
        self._world_name = world_name
        self.in_rank_order = False
        self._lock = threading.Lock()
        self._counts: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._made = 0
        self._refused: set[int] = set()
        self._groups: list[_native.Group] = []

    def make(
        self, parent: int, members: Sequence[int], *, op: str, name: str, group_name: str, timeout: float
    ) -> NativeGroup:
        """Make the group of these global ranks, which include this one, and wait until every member does.

        The members also agree on the number of groups that they have made together. Raises CollectiveTimeout that
        names the missing ranks, CollectiveMismatch when members make other groups with this rank, PeerLost.
        """
        number, count, identity = self._identify(parent, members)
        rank = members.index(self._engine.rank)
        hosts = [self._hosts[member] for member in members]
        group = _native.Group(self._engine, identity, group_name, list(members), rank, hosts)
        call = f"{op}({list(members)})" + (f" for time {count}" if count > 1 else "")
        try:
            group.handshake(call, self._describe(op, number), timeout)
        except BaseException as error:
            if isinstance(error, CollectiveMismatch):
                with self._lock:
                    self._refused.update(group.refused)
            elif isinstance(error, OperationError):
                note_failure()
            group.leave()  # now, and not where the error that refers to it is collected
            raise
        if self.in_rank_order:
            group.reduce_in_rank_order()
        self._keep(group)
        return NativeGroup(self, self._engine, group, identity, members, name, transport_between(hosts))

    def make_of_survivors(
        self, parent: int, members: Sequence[int], *, name: str, group_name: str, timeout: float
    ) -> NativeGroup:
        """Make the group of those of these ranks that live, and wait until each of them does.

        Where a rank is lost meanwhile, or one does not know yet that another is, all begin again. Raises
        CollectiveTimeout that names ranks that live and do not come.
        """
        deadline = time.monotonic() + timeout
        while True:
            gone = set(self._engine.gone_ranks)
            living = [member for member in members if member not in gone]
            left = max(deadline - time.monotonic(), _IDLE_SLICE_SECONDS)
            try:
                return self.make(parent, living, op="shrink_group", name=name, group_name=group_name, timeout=left)
            except (PeerLost, PeerFailed, CollectiveMismatch):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_IDLE_SLICE_SECONDS)

    def renumber(self, members: Sequence[int]) -> None:
        """Call these ranks 0, 1, 2 and so on from now on. Those that are not among them keep their numbers."""
        numbers = list(range(self._engine.world_size)) if self._global_ranks is None else list(self._global_ranks)
        for number, member in enumerate(members):
            numbers[member] = number
        self._global_ranks = numbers
        self._engine.set_global_ranks(numbers)

    def forget(self, group: _native.Group) -> None:
        """Forget a group that this rank has left."""
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)

    def _identify(self, parent: int, members: Sequence[int]) -> tuple[int, int, int]:
        """Return the number of this call, the count of groups of these members, and the group's identity.

        If other members tried to make such a group while this rank made another, they have counted it.
        """
        with self._lock:
            self._made += 1
            while True:
                self._counts[parent, tuple(members)] += 1
                count = self._counts[parent, tuple(members)]
                identity = identity_of(parent, members, count)
                if identity not in self._refused:
                    return self._made, count, identity

    def _keep(self, group: _native.Group) -> None:
        with self._lock:
            self._groups.append(group)

    def _describe(self, op: str, number: int) -> dict[str, Any]:
        """Return the call's description for errors: a call on the world, so that its ranks are global."""
        return {
            "op": op,
            "sequence": number,
            "group": self._world_name,
            "rank": self._engine.rank,
            "size": self._engine.world_size,
            "members": self._global_ranks,
        }


class NativeGroup:
    """One group on an engine: of all its ranks (``native.WorldGroup``), or of some."""

    def __init__(
        self,
        subgroups: Subgroups,
        engine: _native.Engine,
        group: _native.Group,
        identity: int,
        members: Sequence[int],
        name: str,
        transport: str,
    ) -> None:
        self.name = name
        self.transport = transport
        self.calls: _native.Group = group
        self.identity = identity
        self.members: tuple[int, ...] = tuple(members)
        self._engine = engine
        self._subgroups = subgroups

    def records(self) -> list[dict[str, Any]]:
        """Return the last calls of this rank in all groups, oldest first.

        Each has op, sequence, call, state, started_ns and ended_ns. Times are on the monotonic clock; ``ended_ns`` is 0
        while the call runs. Raises ForkedProcessError in a forked child.
        """
        return self._engine.records()

    def allocate(self, nbytes: int, *, copied_by_fork: bool = False) -> Any | None:
        """Return writable memory that the other ranks of this host read in place; None where there is none.

        A forked child shares the memory or, with ``copied_by_fork``, writes into copies.
        """
        return _native.allocate(self._engine, nbytes, copied_by_fork)

    def fail(self, reason: ExitReason, at_once: bool) -> None:
        kind, peer = reason.origin
        self._engine.fail(reason.text, at_once, kind, -1 if peer is None else peer)

    def make_subgroup(
        self, ranks: Sequence[int], *, op: str, name: str, group_name: str, timeout: float
    ) -> GroupEngine:
        members = [self.members[rank] for rank in ranks]
        return self._subgroups.make(self.identity, members, op=op, name=name, group_name=group_name, timeout=timeout)

    def shrink(self, excluded: Collection[int], *, name: str, group_name: str, timeout: float) -> GroupEngine:
        members = [member for rank, member in enumerate(self.members) if rank not in excluded]
        return self._subgroups.make_of_survivors(
            self.identity, members, name=name, group_name=group_name, timeout=timeout
        )

    def reduce_in_rank_order(self) -> None:
        self.calls.reduce_in_rank_order()

    def shutdown(self, reason: ExitReason | None = None, flush: float = FLUSH_SECONDS) -> None:
        """Wait at most ``flush`` seconds for issued calls, and leave this group; other groups go on."""
        wait_for_others(
            lambda: self.calls.is_broken or self.calls.is_idle,
            flush,
            lambda: f"rank {self._engine.rank} leaves a group and waits for {calls_in_progress(self._engine)}",
            pause=_IDLE_SLICE_SECONDS,
        )
        if self.calls.is_broken:
            note_failure()
        self.calls.leave()
        self._subgroups.forget(self.calls)

    def abort(self) -> None:
        note_failure()
        self.calls.abort()
