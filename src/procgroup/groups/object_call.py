"""Calls that move objects: the ranks exchange headers, then the payload moves, then it is unpickled.

A rank that cannot pickle its object sends a header with the error, so that no rank waits for the object. A rank that
cannot unpickle raises after everything has moved. Either way the ranks stay in step and the group stays usable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np

from procgroup import exit_reason
from procgroup.errors import CollectiveMismatch, DistBackendError, MalformedObjects, PicklingFailed, UnpicklingFailed
from procgroup.groups.group import ProcessGroup
from procgroup.groups.object_format import HEADER_BYTES, Bytes, Header, IncomingObjects, OutgoingObjects, make_header

T = TypeVar("T")

# How long a rank that was interrupted while pickling tries to send the error; most other ranks have arrived by then.
_INTERRUPT_SECONDS = 0.2
# The most characters of an exception's text that fit into a header, beside its type and line.
_TEXT_CHARACTERS = 700
# From this size on the ranks agree that every rank has allocated its memory.
_AGREED_BYTES = 64 << 20


class Kind(IntEnum):
    """The object operation that a header belongs to."""

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
    """One object operation on one rank: its group, root (a group rank), deadline, and whether objects are trusted."""

    def __init__(self, group: ProcessGroup, kind: Kind, root: int, seconds: float, safe: bool) -> None:
        self.group = group
        self.kind = kind
        self.root = root
        self.safe = safe
        # Collectives of the group can send a segment's buffers from their own memory; messages cannot.
        self.iovecs: bool = group.takes_iovecs and kind in (Kind.ALL_GATHER, Kind.BROADCAST)
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline - time.monotonic(), 0.001)

    def pickle(self, make: Callable[[], T], send: Callable[[Header], object] | None = None) -> T:
        """Pickle with ``make``. An exception is first sent to the other ranks with ``send`` (default: to all)."""
        send = send or self.exchange
        try:
            return make()
        except Exception as error:
            send(self._error_header(error))
            raise
        except BaseException as error:  # Ctrl-C: the other ranks must not wait for this one
            self._deadline = min(self._deadline, time.monotonic() + _INTERRUPT_SECONDS)
            with contextlib.suppress(Exception):
                send(self._error_header(error))
            raise

    def exchange(self, header: Header) -> list[Header]:
        """Send this rank's header to all ranks, and return the headers of all."""
        received = [np.empty(HEADER_BYTES, np.uint8) for _ in range(self.group.size())]
        self.group.all_gather(received, header.pack(), timeout=self.left)
        return [self.read_header(rank, raw) for rank, raw in enumerate(received)]

    def header(self, outgoing: OutgoingObjects | None, count: int) -> Header:
        """Return the header of this rank, which sends ``outgoing``; None: it sends no objects."""
        return make_header(self.kind, self.root, count, outgoing)

    def agree(self, header: Header) -> list[Header]:
        """Exchange the headers of all ranks, and compare them.

        Raises PicklingFailed when a rank cannot pickle, CollectiveMismatch when the ranks make different calls.
        """
        headers = self.exchange(header)
        for rank, received in enumerate(headers):
            self.require_pickled(rank, received)
        self._compare(headers)
        return headers

    def require_pickled(self, source: int, header: Header) -> None:
        """Raise PicklingFailed when a header says that its rank could not pickle."""
        if header.error is not None:
            raise PicklingFailed(source=source, reason=header.error, **self.error_data())

    def read_header(self, source: int, raw: Bytes) -> Header:
        """Parse a rank's header. Raises DistBackendError when it is malformed."""
        try:
            return Header.unpack(raw)
        except MalformedObjects as error:
            raise self.malformed(source, error) from None

    def incoming(self, source: int, header: Header, metadata: bytes) -> IncomingObjects:
        """Return a rank's objects, not allocated yet. Raises DistBackendError when its metadata is malformed."""
        try:
            return IncomingObjects(header, metadata, self.iovecs)
        except MalformedObjects as error:
            raise self.malformed(source, error) from None

    def unpickle(self, source: int, incoming: IncomingObjects) -> list[Any]:
        """Unpickle a rank's objects. Raises UnpicklingFailed, which names the rank and the type."""
        objects = []
        for index, (type_name, _) in enumerate(incoming.items):
            try:
                objects.append(incoming.unpickle(index, self.safe))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise UnpicklingFailed(
                    source=source, kind=type_name, reason=reason, safe=self.safe, **self.error_data()
                ) from error
        return objects

    def allocate(self, headers: Sequence[Header], incoming: Sequence[IncomingObjects]) -> None:
        """Allocate memory for what this rank receives.

        When the ranks move much in all, a rank without memory makes the call raise on every rank.
        """
        problem: MemoryError | None = None
        try:
            for objects in incoming:
                objects.allocate()
        except MemoryError as error:
            problem = error
        if sum(header.payload_size for header in headers) >= _AGREED_BYTES:
            self._agree_on_memory(problem)
        elif problem is not None:
            raise problem

    def error_data(self) -> dict[str, Any]:
        """Return the data that errors of this call share: operation, group and ranks."""
        group = self.group
        return {
            "op": NAMES[self.kind],
            "group": group.group_name,
            "rank": group.rank(),
            "size": group.size(),
            "members": group.members,
        }

    def malformed(self, source: int, error: MalformedObjects) -> DistBackendError:
        """Return the error for malformed bytes from a rank."""
        group = self.group
        return DistBackendError(
            f"{NAMES[self.kind]} on group {group.group_name} (rank {group.rank()} of {group.size()}): what "
            f"rank {source} sent cannot be read: {error}. Use one version of procgroup and make one call on every rank."
        )

    def _error_header(self, error: BaseException) -> Header:
        return Header(self.kind, self.root, 0, exit_reason.describe(error, _TEXT_CHARACTERS))

    def _agree_on_memory(self, problem: MemoryError | None) -> None:
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

    def _compare(self, headers: Sequence[Header]) -> None:
        """Compare the calls of all ranks: kind, root, and the length of lists that must be equally long."""
        calls = {rank: _describe(header) for rank, header in enumerate(headers)}
        if len(set(calls.values())) > 1:
            raise CollectiveMismatch(calls=calls, sequence=0, **self.error_data())


def _describe(header: Header) -> str:
    name = NAMES[Kind(header.kind)] if header.kind in list(Kind) else f"call {header.kind}"
    root = "" if header.kind == Kind.ALL_GATHER else f", root {header.root}"
    return f"{name}({header.count} objects{root})"
