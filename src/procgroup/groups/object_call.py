"""Calls that move objects: first everybody announces, then what was announced moves, then it is unpickled.

A rank whose object cannot be pickled announces that, so that nobody waits for it. A rank that cannot unpickle
does so after everything has moved. Either way the ranks stay in step and the group stays usable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np

from procgroup.errors import CollectiveMismatch, DistBackendError, PicklingFailed, UnpicklingFailed
from procgroup.groups.envelope import BLOCK_BYTES, Arrival, Block, Bytes, MalformedEnvelope, Parcel, announce
from procgroup.groups.group import ProcessGroup

T = TypeVar("T")

# How long a rank that was interrupted while pickling tries to tell the others, who have mostly arrived by then.
_INTERRUPT_SECONDS = 0.2
# From this size on the ranks agree that everybody has room for what comes.
_AGREED_BYTES = 64 << 20


class Kind(IntEnum):
    """Which call of objects a block belongs to."""

    ALL_GATHER = 1
    BROADCAST = 2
    GATHER = 3
    SCATTER = 4
    SEND = 5
    RECV = 6


NAMES = {
    Kind.ALL_GATHER: "all_gather_object",
    Kind.BROADCAST: "broadcast_object_list",
    Kind.GATHER: "gather_object",
    Kind.SCATTER: "scatter_object_list",
    Kind.SEND: "send_object_list",
    Kind.RECV: "recv_object_list",
}


class ObjectCall:
    """One call on one rank: whom it is made with, until when, whether objects are trusted. ``root`` is a group rank."""

    def __init__(self, group: ProcessGroup, kind: Kind, root: int, seconds: float, safe: bool) -> None:
        self.group = group
        self.kind = kind
        self.root = root
        self.safe = safe
        # What every rank gets moves in the group's collectives, and so from where it lies.
        self.together: bool = group.takes_iovecs and kind in (Kind.ALL_GATHER, Kind.BROADCAST)
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline - time.monotonic(), 0.001)

    def pack(self, make: Callable[[], T], tell: Callable[[Block], object] | None = None) -> T:
        """Pickle with ``make``. Whatever that raises is told to the others (all of them) before it is raised here."""
        tell = tell or self.exchange
        try:
            return make()
        except Exception as error:
            tell(self._refusal(error))
            raise
        except BaseException as error:  # Ctrl-C: the others are not to wait for this rank
            self._deadline = min(self._deadline, time.monotonic() + _INTERRUPT_SECONDS)
            with contextlib.suppress(Exception):
                tell(self._refusal(error))
            raise

    def exchange(self, block: Block) -> list[Block]:
        """Show every rank what each announces."""
        received = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(self.group.size())]
        self.group.all_gather(received, block.pack(), timeout=self.left)
        return [self.read(rank, raw) for rank, raw in enumerate(received)]

    def announce(self, parcel: Parcel | None, count: int) -> Block:
        """Return the block that announces ``parcel``, or that this rank sends nothing."""
        return announce(self.kind, self.root, count, parcel)

    def meet(self, block: Block) -> list[Block]:
        """Show every rank what each announces, and compare.

        Raises PicklingFailed when a rank cannot pickle, CollectiveMismatch when the ranks make different calls.
        """
        blocks = self.exchange(block)
        for rank, announced in enumerate(blocks):
            self.require_pickled(rank, announced)
        self._compare(blocks)
        return blocks

    def require_pickled(self, source: int, block: Block) -> None:
        """Raise PicklingFailed when a block says that its rank could not pickle."""
        if block.error is not None:
            raise PicklingFailed(source=source, reason=block.error, **self.where())

    def read(self, source: int, raw: Bytes) -> Block:
        """Read a rank's block. Raises DistBackendError when it is none."""
        try:
            return Block.unpack(raw)
        except MalformedEnvelope as error:
            raise self.malformed(source, error) from None

    def expect(self, source: int, block: Block, letter: bytes) -> Arrival:
        """Return what will hold a rank's objects, without room for them. Raises DistBackendError for contradictions."""
        try:
            return Arrival(block, letter, self.together)
        except MalformedEnvelope as error:
            raise self.malformed(source, error) from None

    def open(self, source: int, arrival: Arrival) -> list[Any]:
        """Unpickle a rank's objects. Raises UnpicklingFailed, which names the rank and the type."""
        objects = []
        for index, (type_name, _) in enumerate(arrival.items):
            try:
                objects.append(arrival.item(index, self.safe))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise UnpicklingFailed(
                    source=source, kind=type_name, reason=reason, safe=self.safe, **self.where()
                ) from error
        return objects

    def make_room(self, blocks: Sequence[Block], arrivals: Sequence[Arrival]) -> None:
        """Allocate what will be received. When much was announced, an error on every rank if one of them cannot."""
        problem: MemoryError | None = None
        try:
            for arrival in arrivals:
                arrival.allocate()
        except MemoryError as error:
            problem = error
        if sum(block.payload_size for block in blocks) >= _AGREED_BYTES:
            self._agree(problem)
        elif problem is not None:
            raise problem

    def where(self) -> dict[str, Any]:
        """Return what errors tell of a call: its name, group and ranks."""
        group = self.group
        return {
            "op": NAMES[self.kind],
            "group": group.group_name,
            "rank": group.rank(),
            "size": group.size(),
            "members": group.members,
        }

    def _refusal(self, error: BaseException) -> Block:
        return Block(self.kind, self.root, 0, f"{type(error).__name__}: {error}")

    def malformed(self, source: int, error: MalformedEnvelope) -> DistBackendError:
        """Return the error for bytes that make no sense."""
        group = self.group
        return DistBackendError(
            f"{NAMES[self.kind]} on group {group.group_name} (rank {group.rank()} of {group.size()}): what "
            f"rank {source} sent cannot be read: {error}. Use one version of procgroup and make one call on every rank."
        )

    def _agree(self, problem: MemoryError | None) -> None:
        mine = np.array([problem is not None], np.uint8)
        answers = [np.empty(1, np.uint8) for _ in range(self.group.size())]
        self.group.all_gather(answers, mine, timeout=self.left)
        if problem is not None:
            raise problem
        for rank, answer in enumerate(answers):
            if answer[0]:
                raise DistBackendError(
                    f"{NAMES[self.kind]} on group {self.group.group_name} (rank {self.group.rank()} of "
                    f"{self.group.size()}): rank {rank} has no memory for the objects; nothing was received."
                )

    def _compare(self, blocks: Sequence[Block]) -> None:
        """Compare the calls of all ranks: their kind, their root and, where lists must be of one length, that."""
        calls = {rank: _describe(block) for rank, block in enumerate(blocks)}
        if len(set(calls.values())) > 1:
            raise CollectiveMismatch(calls=calls, sequence=0, **self.where())


def _describe(block: Block) -> str:
    name = NAMES[Kind(block.kind)] if block.kind in list(Kind) else f"call {block.kind}"
    root = "" if block.kind == Kind.ALL_GATHER else f", root {block.root}"
    return f"{name}({block.count} objects{root})"
