"""Connects every rank of a new process group with every other, once, at start-up.

::

    publish   my Unix address, process and cores      one request reads everybody's
    connect   to every lower rank and accept from every higher one, all at once (connecting.py); both prove the
              data key; over a Unix socket the arenas' descriptors cross; over TCP the socket is the channel
    agree     publish how it went; shared memory is used when every pair succeeded, TCP otherwise

"Same host" means that the Unix-socket exchange succeeded: host names, boot ids and process ids decide
nothing. The Unix address is abstract (nothing appears in a file system) and says nothing by itself: a
stranger who finds it cannot prove the key.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from procgroup.backends.connecting import Connection, Details, connect_all
from procgroup.backends.handshake import Refused
from procgroup.backends.route import Route
from procgroup.errors import DistNetworkError
from procgroup.stores.start_up import StartUp
from procgroup.stores.store import Store

# A full queue of connections only delays a rank, which then connects again.
_BACKLOG = 128


class Mesh:
    """This rank's place among the ranks that connect to each other through one store.

    Every wait raises PeerLost or PeerFailed when another rank is gone, CollectiveTimeout when one is late.
    """

    def __init__(self, start_up: StartUp, key: bytes) -> None:
        self.start_up = start_up
        self.key = key
        self.cores: dict[int, list[int]] = {}

    @property
    def rank(self) -> int:
        return self.start_up.me.rank

    @property
    def size(self) -> int:
        return self.start_up.me.size

    @property
    def store(self) -> Store:
        return self.start_up.store

    def connect_shared(self, arena: int, offset: int) -> list[Connection] | str:
        """Exchange arenas with every rank; return the connections, or why some rank could not."""
        with _listening_unix() as (listener, address):
            published = self._publish("unix", {"address": address, "cores": sorted(os.sched_getaffinity(0))})
            self.cores = {rank: entry["cores"] for rank, entry in enumerate(published)}
            return self._connect_all("unix", listener, published, Details(offset, arena))

    def connect_sockets(self, route: Route) -> list[Connection]:
        """Connect with every rank over TCP, listening where ``route`` says; raises DistNetworkError."""
        with route.listen() as listener:
            port = listener.getsockname()[1]
            published = self._publish("tcp", {"address": [route.local, port]})
            for entry in published:
                entry["address"][0] = route.address_of(entry["address"][0])
            connections = self._connect_all("tcp", listener, published, Details(0, None))
        if isinstance(connections, str):
            raise DistNetworkError(
                f"rank {self.rank} of {self.size}: no TCP connections between the ranks: {connections}"
            )
        return connections

    def agree(self, stage: str, problem: str | None) -> str | None:
        """Tell the others how a stage went here; return the first problem of any rank, or None."""
        with self.start_up.naming_ranks():
            if problem is not None:
                self.store.set(f"{stage}/failed", f"rank {self.rank}: {problem}")
            self.store.set(f"{stage}/verdict/{self.rank}", problem or "")
        verdicts = self.start_up.gather(f"{stage}/verdict")
        return next((f"rank {rank}: {text.decode()}" for rank, text in enumerate(verdicts) if text), None)

    def _publish(self, stage: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
        with self.start_up.naming_ranks():
            self.store.set(f"{stage}/{self.rank}", json.dumps(entry))
        return [json.loads(value) for value in self.start_up.gather(stage)]

    def _connect_all(
        self, stage: str, listener: socket.socket, published: list[dict[str, Any]], details: Details
    ) -> list[Connection] | str:
        connections: list[Connection] = []
        problem: str | None = None
        try:
            connections = connect_all(
                self.rank,
                self.size,
                listener,
                [entry["address"] for entry in published],
                key=self.key,
                details=details,
                deadline=self.start_up.deadline,
                look=lambda: self._raise_reported(stage),
            )
        except (OSError, DistNetworkError) as error:
            problem = str(error)
        return self._keep_unless(stage, problem, connections)

    def _raise_reported(self, stage: str) -> None:
        """Raise Refused when another rank has reported that it cannot connect: nobody awaits this rank any more.

        Raises PeerLost or PeerFailed when a rank is gone.
        """
        self.start_up.raise_if_lost()
        with self.start_up.naming_ranks():
            if self.store.check([f"{stage}/failed"]):
                raise Refused(self.store.get(f"{stage}/failed").decode())

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


def _close(connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()


@contextmanager
def _listening_unix() -> Iterator[tuple[socket.socket, str]]:
    address = f"procgroup-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0" + address.encode())
        listener.listen(_BACKLOG)
        yield listener, address
