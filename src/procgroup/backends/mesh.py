"""Connects every rank of a new process group with every other, once, at start-up.

::

    publish   my Unix address, process and cores      one multi_get reads everybody's
    connect   to every lower rank, accept from every higher one; both prove the data key;
              over a Unix socket the arenas' descriptors cross; over TCP the socket is the channel
    agree     publish how it went; shared memory is used when every pair succeeded, TCP otherwise

"Same host" means that the Unix-socket exchange succeeded: host names, boot ids and process ids decide
nothing. The Unix address is abstract (nothing appears in a file system) and says nothing by itself: a
stranger who finds it cannot prove the key.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from procgroup.backends.handshake import Refused, accept_from, connect_to, receive_exactly, remaining
from procgroup.errors import DistNetworkError
from procgroup.stores.store import Store

_DETAILS = struct.Struct("!QQ")
_LOOK_AT_STORE_SECONDS = 0.2
_HANDSHAKE_SECONDS = 2.0


@dataclass(frozen=True)
class Connection:
    """A proven connection to one rank: its socket and, when it shares memory, its arena."""

    peer: int
    socket: socket.socket
    pid: int
    offset: int
    arena: int | None

    def close(self) -> None:
        """Let go of the socket and the arena's descriptor."""
        self.socket.close()
        if self.arena is not None:
            os.close(self.arena)


@dataclass
class Mesh:
    """This rank's place among the ranks that connect to each other through one store."""

    store: Store
    rank: int
    size: int
    key: bytes
    deadline: float
    cores: dict[int, list[int]] = field(default_factory=dict)

    def connect_shared(self, arena: int, offset: int) -> list[Connection] | str:
        """Exchange arenas with every rank; return the connections, or why some rank could not."""
        with _listening_unix() as (listener, address):
            published = self._publish("unix", {"address": address, "cores": sorted(os.sched_getaffinity(0))})
            self.cores = {rank: entry["cores"] for rank, entry in enumerate(published)}
            return self._connect_all("unix", listener, published, _Details(offset, arena))

    def connect_sockets(self, address: str) -> list[Connection]:
        """Connect with every rank over TCP, listening on the literal ``address``; raises DistNetworkError."""
        with socket.create_server((address, 0), family=_family(address), backlog=self.size) as listener:
            port = listener.getsockname()[1]
            published = self._publish("tcp", {"address": [address, port]})
            connections = self._connect_all("tcp", listener, published, _Details(0, None))
        if isinstance(connections, str):
            raise DistNetworkError(
                f"rank {self.rank} of {self.size}: no TCP connections between the ranks: {connections}"
            )
        return connections

    def agree(self, stage: str, problem: str | None) -> str | None:
        """Tell the others how a stage went here; return the first problem of any rank, or None."""
        if problem is not None:
            self.store.set(f"{stage}/failed", f"rank {self.rank}: {problem}")
        self.store.set(f"{stage}/verdict/{self.rank}", problem or "")
        verdicts = self.store.multi_get([f"{stage}/verdict/{rank}" for rank in range(self.size)], self._left())
        return next((f"rank {rank}: {text.decode()}" for rank, text in enumerate(verdicts) if text), None)

    def _left(self) -> float:
        return remaining(self.deadline)

    def _publish(self, stage: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
        self.store.set(f"{stage}/{self.rank}", json.dumps(entry))
        values = self.store.multi_get([f"{stage}/{rank}" for rank in range(self.size)], self._left())
        return [json.loads(value) for value in values]

    def _connect_all(
        self, stage: str, listener: socket.socket, published: list[dict[str, Any]], details: _Details
    ) -> list[Connection] | str:
        connections: list[Connection] = []
        problem: str | None = None
        try:
            connections.extend(self._connect(peer, published[peer]["address"], details) for peer in range(self.rank))
            connections.extend(self._accept(stage, listener, details))
        except (OSError, DistNetworkError) as error:
            problem = str(error)
        except BaseException:
            _close(connections)
            raise
        return self._keep_unless(stage, problem, connections)

    def _keep_unless(self, stage: str, problem: str | None, connections: list[Connection]) -> list[Connection] | str:
        """Agree with the others; return the connections, or close them and return the first problem of any rank."""
        try:
            first = self.agree(stage, problem)
        except BaseException:
            _close(connections)
            raise
        if first is None:
            return connections
        _close(connections)
        return first

    def _connect(self, peer: int, address: str | list[Any], details: _Details) -> Connection:
        if isinstance(address, str):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            connection = socket.socket(_family(address[0]), socket.SOCK_STREAM)
        try:
            connection.settimeout(self._left())
            connection.connect(b"\0" + address.encode() if isinstance(address, str) else tuple(address))
            connect_to(connection, self.rank, peer, self.key)
            details.send(connection)
            return _Details.receive(connection, peer, details.arena is not None)
        except OSError as error:
            connection.close()
            raise Refused(f"rank {peer} at {address} was not reached: {error.strerror or error}") from error
        except BaseException:
            connection.close()
            raise

    def _accept(self, stage: str, listener: socket.socket, details: _Details) -> Iterator[Connection]:
        awaited = set(range(self.rank + 1, self.size))
        listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while awaited:
                if selector.select(min(self._left(), _LOOK_AT_STORE_SECONDS)):
                    connection = self._accept_one(listener, awaited, details)
                    if connection is not None:
                        awaited.remove(connection.peer)
                        yield connection
                elif self.store.check([f"{stage}/failed"]):
                    raise Refused(self.store.get(f"{stage}/failed").decode())
                elif time.monotonic() > self.deadline:
                    raise Refused(f"no connection from ranks {sorted(awaited)} in time")

    def _accept_one(self, listener: socket.socket, awaited: set[int], details: _Details) -> Connection | None:
        """Accept one rank; a stranger or a rank that is not awaited is turned away, and harms nobody."""
        try:
            connection, _ = listener.accept()
        except OSError:
            return None
        try:
            connection.settimeout(min(self._left(), _HANDSHAKE_SECONDS))
            peer = accept_from(connection, self.rank, self.key)
            if peer not in awaited:
                raise Refused(f"rank {peer} connected twice")
            details.send(connection)
            return _Details.receive(connection, peer, details.arena is not None)
        except (OSError, Refused):
            connection.close()
            return None


@dataclass(frozen=True)
class _Details:
    """What two ranks tell each other once they have proven who they are."""

    offset: int
    arena: int | None

    def send(self, connection: socket.socket) -> None:
        message = _DETAILS.pack(os.getpid(), self.offset)
        if self.arena is None:
            connection.sendall(message)
        else:
            socket.send_fds(connection, [message], [self.arena])

    @staticmethod
    def receive(connection: socket.socket, peer: int, with_arena: bool) -> Connection:
        if not with_arena:
            pid, offset = _DETAILS.unpack(receive_exactly(connection, _DETAILS.size))
            return Connection(peer, connection, pid, offset, None)
        message, descriptors, _, _ = socket.recv_fds(
            connection, _DETAILS.size, 1, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
        )
        if len(descriptors) != 1 or len(message) != _DETAILS.size:
            for descriptor in descriptors:
                os.close(descriptor)
            raise Refused(f"rank {peer} sent no arena")
        pid, offset = _DETAILS.unpack(message)
        return Connection(peer, connection, pid, offset, descriptors[0])


def _close(connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@contextmanager
def _listening_unix() -> Iterator[tuple[socket.socket, str]]:
    address = f"procgroup-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0" + address.encode())
        listener.listen(128)
        yield listener, address


def address_facing(store: Store) -> str:
    """The literal local address that reaches the store's host; loopback for stores without a host."""
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    if host is None or port is None:
        return "127.0.0.1"
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
