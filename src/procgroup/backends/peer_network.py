"""Connects every rank of a new process group with every other, once, at start-up.

::

    publish   own Unix and TCP addresses, host and cores     one request reads those of all ranks
    connect   to every lower rank and accept from every higher one, all at once (connecting.py); both prove the
              data key; over a Unix socket the arenas' descriptors cross; over TCP the socket is the channel
    agree     publish the outcome and the ranks that share memory with this one: so all know which ranks are on one host

"Same host" means that the Unix-socket exchange succeeded: host names, boot ids and process ids are not compared, and
PROCGROUP_HOST_ID only separates ranks. The Unix address is abstract (nothing appears in a file system) and gives no
access by itself: a process outside the job cannot prove the key.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from procgroup import environ
from procgroup.backends.connecting import Address, Connection, Details, connect_all
from procgroup.errors import DistNetworkError, Refused
from procgroup.stores.addresses import listen, numeric
from procgroup.stores.start_up import StartUp
from procgroup.stores.store import Store

# A full queue of connections only delays a rank, which then connects again.
_BACKLOG = 128
# Connecting ends this long before the deadline, so that the ranks can exchange its outcome.
_EXCHANGE_SECONDS = 0.5
_LOOPBACK = "127.0.0.1"


class Route(NamedTuple):
    """The TCP addresses at which the ranks of a group reach each other, derived from the store's address.

    ``host`` is that host as the store was given it, ``store`` its literal address as seen from here, ``local`` the
    literal address of this rank's own host on the way there.
    """

    host: str
    store: str
    local: str

    @property
    def listening_host(self) -> str:
        """Where this rank listens so that the other ranks can reach it.

        That is ``local`` alone, unless ``local`` is a loopback address because the store's host has a name that leads
        to 127.0.1.1 on that host itself: then the other hosts reach this one at another address.
        """
        has_name = numeric(self.host) is None and self.host.lower() not in ("", "localhost")
        return self.host if has_name and _is_loopback(self.local) else self.local

    def listen(self) -> socket.socket:
        """Return a socket that listens on a free port at an address that the other ranks can reach."""
        return listen(self.listening_host, 0)

    def address_of(self, published: str) -> str:
        """Return the address at which this rank reaches a rank that published its ``local``.

        A rank with a loopback address is on the store's host, and other hosts reach it where they reach the store.
        """
        return self.store if _is_loopback(published) and not _is_loopback(self.local) else published


def route_to(store: Store) -> Route:
    """Return the way to the store's host; loopback for stores without a host."""
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    if host is None or port is None:
        return Route(_LOOPBACK, _LOOPBACK, _LOOPBACK)
    name = host.encode() if host.isascii() else host  # see launch/hosted_store.py
    family, _, _, _, target = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return Route(str(host), str(target[0]), str(probe.getsockname()[0]))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class Links(NamedTuple):
    """This rank's connections, and the published data of all ranks."""

    connections: list[Connection]
    hosts: list[int]
    """For each rank the lowest rank with which it shares memory, equal on all ranks."""
    host_names: list[str]
    cores: list[list[int]]
    problem: str
    """Why some rank has no memory to share; empty when all have."""


class PeerNetwork:
    """The connections of this rank with all others, made through one store.

    Every wait raises PeerLost or PeerFailed when another rank is lost, CollectiveTimeout when one is late.
    """

    def __init__(self, start_up: StartUp, key: bytes) -> None:
        self.start_up = start_up
        self.key = key

    @property
    def rank(self) -> int:
        return self.start_up.me.rank

    @property
    def size(self) -> int:
        return self.start_up.me.size

    @property
    def store(self) -> Store:
        return self.start_up.store

    def connect(self, details: Details, route: Route | None, problem: str = "") -> Links:
        """Connect to every rank: by shared memory where both offer it and are on one host, else over TCP.

        ``details`` without an arena offer no memory, for the reason ``problem``; without ``route`` there is no TCP.
        Raises DistNetworkError when two ranks cannot be connected.
        """
        with ExitStack() as stack:
            entry: dict[str, Any] = {
                "host": socket.gethostname(),
                "host_id": environ.PROCGROUP_HOST_ID.get(),
                "cores": sorted(os.sched_getaffinity(0)),
                "problem": problem,
            }
            listeners = []
            if details.arena is not None:
                listener, entry["unix"] = stack.enter_context(_listening_unix())
                listeners.append(listener)
            if route is not None:
                listeners.append(stack.enter_context(route.listen()))
                entry["tcp"] = [route.local, listeners[-1].getsockname()[1]]
            published = self._publish("links", entry)
            addresses = [self._addresses_of(entry, other, route) for other in published]
            connections = self._connect_all(listeners, addresses, details)
        if isinstance(connections, str):
            raise DistNetworkError(f"rank {self.rank} of {self.size}: the ranks cannot be connected: {connections}")
        shared = sorted([self.rank, *(one.peer for one in connections if one.arena is not None)])
        return Links(
            connections,
            hosts_of([json.loads(value) for value in self._exchange("shared", json.dumps(shared))]),
            [_name_of(other) for other in published],
            [list(other["cores"]) for other in published],
            next((f"rank {rank}: {other['problem']}" for rank, other in enumerate(published) if other["problem"]), ""),
        )

    @staticmethod
    def _addresses_of(mine: dict[str, Any], theirs: dict[str, Any], route: Route | None) -> list[Address]:
        may_share = "unix" in mine and "unix" in theirs and mine["host_id"] == theirs["host_id"]
        addresses: list[Address] = [theirs["unix"]] if may_share else []
        if route is not None and "tcp" in theirs:
            host, port = theirs["tcp"]
            addresses.append([route.address_of(host), port])
        return addresses

    def agree(self, stage: str, problem: str | None) -> str | None:
        """Publish the outcome of a stage; return the first problem of any rank, or None."""
        with self.start_up.mapped_store_errors():
            if problem is not None:
                self.store.set(f"{stage}/failed", f"rank {self.rank}: {problem}")
            self.store.set(f"{stage}/verdict/{self.rank}", problem or "")
        verdicts = self.start_up.gather(f"{stage}/verdict")
        return next((f"rank {rank}: {text.decode()}" for rank, text in enumerate(verdicts) if text), None)

    def _publish(self, stage: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(value) for value in self._exchange(stage, json.dumps(entry))]

    def _exchange(self, stage: str, value: str) -> list[bytes]:
        """Publish a value, and return those of all ranks once every rank has published one."""
        with self.start_up.mapped_store_errors():
            self.store.set(f"{stage}/{self.rank}", value)
        return self.start_up.gather(stage)

    def _connect_all(
        self, listeners: list[socket.socket], addresses: list[list[Address]], details: Details
    ) -> list[Connection] | str:
        connections: list[Connection] = []
        problem: str | None = None
        left = self.start_up.left()
        try:
            for peer, candidates in enumerate(addresses):
                if peer != self.rank and not candidates:
                    raise Refused(f"rank {peer} offers neither memory nor a socket that this rank can use")
            connections = connect_all(
                self.rank,
                self.size,
                listeners,
                addresses,
                key=self.key,
                details=details,
                deadline=time.monotonic() + max(left - _EXCHANGE_SECONDS, 0.9 * left),
                look=lambda: self._raise_reported("links"),
            )
        except (OSError, DistNetworkError) as error:
            problem = str(error)
        return self._keep_unless("links", problem, connections)

    def _raise_reported(self, stage: str) -> None:
        """Raise Refused when another rank has reported that it cannot connect: it does not wait for this one.

        Raises PeerLost or PeerFailed when a rank is lost.
        """
        self.start_up.raise_if_lost()
        with self.start_up.mapped_store_errors():
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


def hosts_of(shared: list[list[int]]) -> list[int]:
    """Return for each rank the lowest rank on its host.

    ``shared`` has, for each rank, the ranks with which it shares memory, itself among them. Ranks of one host all share
    memory with each other; where only some of them do, each counts as a host of its own.
    """
    return [min(ranks) if all(shared[other] == ranks for other in ranks) else rank for rank, ranks in enumerate(shared)]


def _name_of(entry: dict[str, Any]) -> str:
    host, host_id = str(entry["host"]), str(entry["host_id"])
    return f"{host} (PROCGROUP_HOST_ID {host_id})" if host_id else host


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
