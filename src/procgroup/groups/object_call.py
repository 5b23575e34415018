"""Calls that move objects: the ranks exchange headers, then the payload moves, then it is unpickled.

Small objects are in their header as a whole: then the exchange of headers is all that moves. A rank that cannot pickle
its object sends a header with the error, so that no rank waits for the object. A rank that cannot unpickle raises after
everything has moved. Either way the ranks stay in step and the group stays usable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from procgroup import _native
from procgroup.errors import CollectiveMismatch, DistBackendError, MalformedObjects, PicklingFailed, UnpicklingFailed
from procgroup.groups.group import ProcessGroup
from procgroup.groups.object_format import (
    HEADER_BYTES,
    IncomingObjects,
    ObjectHeader,
    OutgoingObjects,
    make_header,
    pack_whole_objects,
)
from procgroup.groups.pickling import Pickled, loader, pickle_object, unpickle_object
from procgroup.process import exit_reason
from procgroup.types import Timeout

# How long a rank that was interrupted while pickling tries to send the error; most other ranks have arrived by then.
_INTERRUPT_SECONDS = 0.2
# The most characters of an exception's text that fit into a header, beside its type and line.
_TEXT_CHARACTERS = 700
# From this size on the ranks agree that every rank has allocated its memory.
_AGREED_BYTES = 64 << 20

NONE = -2
"""No object is wanted."""


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
    """One object operation on one rank: its group, root (a group rank), timeout, and whether objects are trusted.

    After ``exchange``, ``headers`` are those of all ranks.
    """

    def __init__(
        self,
        group: ProcessGroup,
        kind: Kind,
        root: int,
        timeout: Timeout | None,
        safe: bool,
        started: float | None = None,
    ) -> None:
        self.group = group
        self.kind = kind
        self.root = root
        self.timeout = timeout
        self.safe = safe
        self.headers: list[bytes] = []
        self._started = time.monotonic() if started is None else started
        self._seconds: float | None = None
        self._outgoing: OutgoingObjects | None = None

    @property
    def iovecs(self) -> bool:
        """Whether segments can be sent from the memory of their buffers: in collectives, not in messages."""
        return self.group.takes_iovecs and self.kind in (Kind.ALL_GATHER, Kind.BROADCAST)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        if self._seconds is None:
            self._seconds = self.group.seconds_of(self.timeout)
        return max(self._started + self._seconds - time.monotonic(), 0.001)

    def exchange(self, objects: Sequence[Any] | None, count: int, wanted: int | None = None) -> list[list[Any]] | None:
        """Send the header of this rank's objects to all ranks; None: it sends none, where others send ``count``.

        Return the objects of all ranks, or of each rank the one that is ``wanted``, where all headers hold them as a
        whole; else None. ``wanted=NONE`` makes no objects. Raises as ``unpickle``.
        """
        if self.group.takes_iovecs:
            given = count if objects is None else objects
            loads = None if wanted == NONE else loader(self.safe)
            found = self.group.calls.exchange_objects(
                given, self.kind, self.root, count, loads, -1 if wanted is None else wanted, self.timeout
            )
            if found is not None:
                self.headers, made, failed = found
                if failed is None:
                    return made
                raise self.unpickling_failed(*failed, self.headers[failed[0]]) from failed[2]
        header = (
            ObjectHeader(self.kind, self.root, count).pack()
            if objects is None
            else self._pack(objects, self.send_to_all)
        )
        self.headers = self.send_to_all(header)
        whole = _native.whole_objects(self.headers, self.kind, self.root, count)
        if whole is None:
            return None
        return [] if wanted == NONE else [self._load(rank, streams, wanted) for rank, streams in enumerate(whole)]

    def send_to_all(self, header: bytes) -> list[bytes]:
        """Send a header to all ranks, and return the headers of all."""
        group = self.group
        if group.takes_iovecs:
            found = group.calls.exchange_objects(header, self.kind, self.root, 0, None, NONE, self.left)
            assert found is not None
            return found[0]
        received = [np.empty(HEADER_BYTES, np.uint8) for _ in range(group.size())]
        group.all_gather(received, np.frombuffer(header, np.uint8), timeout=self.left)
        return [raw.tobytes() for raw in received]

    def send(self, objects: Sequence[Any], destination: int, tag: int) -> OutgoingObjects | None:
        """Send the header of objects to one rank; return the objects, unless the header holds them as a whole."""
        header = self._pack(objects, lambda failed: self.send_header(failed, destination, tag))
        self.send_header(header, destination, tag)
        assert self._outgoing is not None
        return None if self._outgoing.is_whole else self._outgoing

    def send_header(self, header: bytes, destination: int, tag: int) -> None:
        """Send a header to one rank."""
        if self.group.takes_iovecs:
            self.group.calls.send_objects(header, self.kind, destination, tag, self.left)
        else:
            self.group.send(np.frombuffer(header, np.uint8), destination, tag, timeout=self.left)

    def recv_header(self, source: int | None, tag: int) -> tuple[bytes, int]:
        """Receive a header from one rank, or from any with None; return it and its sender's group rank."""
        raw = np.empty(HEADER_BYTES, np.uint8)
        sender = self.group.recv(raw, source, tag, self.left)
        return raw.tobytes(), sender

    def outgoing(self, objects: Sequence[Any]) -> OutgoingObjects:
        """Return this rank's objects for what moves after the headers: pickled again if their header held them."""
        return self._outgoing or OutgoingObjects(self._pickle(objects, self.send_to_all), self.iovecs)

    def _pack(self, objects: Sequence[Any], send: Callable[[bytes], object]) -> bytes:
        """Pickle objects, and return the header of a rank that sends them."""
        pickled = self._pickle(objects, send)
        self._outgoing = OutgoingObjects(pickled, self.iovecs)
        whole = pack_whole_objects(self.kind, self.root, pickled)
        return whole or make_header(self.kind, self.root, len(pickled), self._outgoing).pack()

    def _pickle(self, objects: Sequence[Any], send: Callable[[bytes], object]) -> list[Pickled]:
        """Pickle each object. An exception is first sent to the other ranks with ``send``."""
        try:
            return [pickle_object(value) for value in objects]
        except Exception as error:
            send(self._error_header(error))
            raise
        except BaseException as error:  # Ctrl-C: the other ranks must not wait for this one
            self._seconds = min(self.left, _INTERRUPT_SECONDS) + time.monotonic() - self._started
            with contextlib.suppress(Exception):
                send(self._error_header(error))
            raise

    def _load(self, source: int, streams: Sequence[bytes], wanted: int | None) -> list[Any]:
        """Unpickle the objects that a rank's header holds as a whole, or the one that is wanted."""
        made: list[Any] = []
        for index, stream in enumerate(streams):
            if wanted in (None, index):
                try:
                    made.append(unpickle_object(stream, (), self.safe))
                except Exception as error:
                    raise self.unpickling_failed(source, index, error, self.headers[source]) from error
        return made

    def agree(self) -> list[ObjectHeader]:
        """Parse the headers of all ranks, and compare them.

        Raises PicklingFailed when a rank cannot pickle, CollectiveMismatch when the ranks make different calls.
        """
        headers = [self.read_header(rank, header) for rank, header in enumerate(self.headers)]
        for rank, header in enumerate(headers):
            self.require_pickled(rank, header)
        self._compare(headers)
        return headers

    def require_pickled(self, source: int, header: ObjectHeader) -> None:
        """Raise PicklingFailed when a header says that its rank could not pickle."""
        if header.error is not None:
            raise PicklingFailed(source=source, reason=header.error, **self.error_data())

    def read_header(self, source: int, raw: bytes) -> ObjectHeader:
        """Parse a rank's header. Raises DistBackendError when it is malformed."""
        try:
            return ObjectHeader.unpack(raw)
        except MalformedObjects as error:
            raise self.malformed(source, error) from None

    def incoming(self, source: int, header: ObjectHeader, metadata: bytes | None = None) -> IncomingObjects:
        """Return a rank's objects, not allocated yet. Raises DistBackendError when its metadata is malformed.

        The metadata are in the header unless they are given.
        """
        if metadata is None:
            metadata = header.inline[: header.metadata_size]
        try:
            return IncomingObjects(header, metadata, self.iovecs)
        except MalformedObjects as error:
            raise self.malformed(source, error) from None

    def unpickle(self, source: int, incoming: IncomingObjects) -> list[Any]:
        """Unpickle a rank's objects. Raises UnpicklingFailed, which names the rank and the type."""
        objects: list[Any] = []
        for index, (type_name, _) in enumerate(incoming.items):
            try:
                objects.append(incoming.unpickle(index, self.safe))
            except Exception as error:
                raise self._unpickling_error(source, type_name, error) from error
        return objects

    def unpickling_failed(self, source: int, index: int, error: Exception, header: bytes) -> UnpicklingFailed:
        """Return the error for an object that a rank's header holds."""
        incoming = self.incoming(source, self.read_header(source, header))
        return self._unpickling_error(source, incoming.items[index][0], error)

    def _unpickling_error(self, source: int, type_name: str, error: Exception) -> UnpicklingFailed:
        reason = f"{type(error).__name__}: {error}"
        return UnpicklingFailed(source=source, kind=type_name, reason=reason, safe=self.safe, **self.error_data())

    def allocate(self, headers: Sequence[ObjectHeader], incoming: Sequence[IncomingObjects]) -> None:
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

    def _error_header(self, error: BaseException) -> bytes:
        return ObjectHeader(self.kind, self.root, 0, exit_reason.describe(error, _TEXT_CHARACTERS)).pack()

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

    def _compare(self, headers: Sequence[ObjectHeader]) -> None:
        """Compare the calls of all ranks: kind, root, and the length of lists that must be equally long."""
        calls = {rank: _describe(header) for rank, header in enumerate(headers)}
        if len(set(calls.values())) > 1:
            raise CollectiveMismatch(calls=calls, sequence=0, **self.error_data())


def _describe(header: ObjectHeader) -> str:
    name = NAMES[Kind(header.kind)] if header.kind in list(Kind) else f"call {header.kind}"
    root = "" if header.kind == Kind.ALL_GATHER else f", root {header.root}"
    return f"{name}({header.count} objects{root})"
