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
from contextlib import ExitStack
from typing import Any, NamedTuple

from procgroup.backends.connecting import Address, Details, PeerConnection, connect_all
from procgroup.errors import DistNetworkError, Refused
from procgroup.process import environ
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

    connections: list[PeerConnection]
    hosts: list[int]
    """For each rank the lowest rank with which it shares memory, equal on all ranks."""
    host_names: list[str]
    cores: list[list[int]]
    problem: str
    """Why some rank has no memory to share; empty when all have."""


def connect(start_up: StartUp, key: bytes, details: Details, route: Route | None, problem: str = "") -> Links:
    """Connect this rank to every other: by shared memory where both offer it and are on one host, else over TCP.

    ``key`` is the data key. ``details`` without an arena offer no memory, for the reason ``problem``; without ``route``
    there is no TCP. Raises DistNetworkError when two ranks cannot be connected, PeerLost or PeerFailed when another
    rank is lost, CollectiveTimeout when one is late.
    """
    me = start_up.me
    with ExitStack() as stack:
        entry: dict[str, Any] = {
            "host": socket.gethostname(),
            "host_id": environ.PROCGROUP_HOST_ID.get(),
            "cores": sorted(os.sched_getaffinity(0)),
            "problem": problem,
        }
        listeners = []
        if details.arena is not None:
            entry["unix"] = f"procgroup-{secrets.token_hex(16)}"
            listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
            listeners[-1].bind(b"\0" + entry["unix"].encode())
            listeners[-1].listen(_BACKLOG)
        if route is not None:
            # At a free port, at an address that the other ranks can reach.
            listeners.append(stack.enter_context(listen(route.listening_host, 0)))
            entry["tcp"] = [route.local, listeners[-1].getsockname()[1]]
        published = [json.loads(value) for value in start_up.exchange("links", json.dumps(entry))]
        addresses = [_addresses_of(entry, other, route) for other in published]
        failure: str | None = None
        connections: list[PeerConnection] = []
        left = start_up.left()
        try:
            for peer, candidates in enumerate(addresses):
                if peer != me.rank and not candidates:
                    raise Refused(f"rank {peer} offers neither memory nor a socket that this rank can use")
            connections = connect_all(
                me.rank,
                me.size,
                listeners,
                addresses,
                key=key,
                details=details,
                deadline=time.monotonic() + max(left - _EXCHANGE_SECONDS, 0.9 * left),
                look=lambda: start_up.raise_if_failed("links"),
            )
        except (OSError, DistNetworkError) as error:
            failure = str(error)
        try:
            failure = start_up.agree("links", failure)
            if failure is not None:
                raise DistNetworkError(f"rank {me.rank} of {me.size}: the ranks cannot be connected: {failure}")
        except BaseException:
            for connection in connections:
                connection.close()
            raise
    shared = sorted([me.rank, *(one.peer for one in connections if one.arena is not None)])
    return Links(
        connections,
        hosts_of([json.loads(value) for value in start_up.exchange("shared", json.dumps(shared))]),
        [_name_of(other) for other in published],
        [list(other["cores"]) for other in published],
        next((f"rank {rank}: {other['problem']}" for rank, other in enumerate(published) if other["problem"]), ""),
    )


def _addresses_of(mine: dict[str, Any], theirs: dict[str, Any], route: Route | None) -> list[Address]:
    may_share = "unix" in mine and "unix" in theirs and mine["host_id"] == theirs["host_id"]
    addresses: list[Address] = [theirs["unix"]] if may_share else []
    if route is not None and "tcp" in theirs:
        host, port = theirs["tcp"]
        addresses.append([route.address_of(host), port])
    return addresses


def hosts_of(shared: list[list[int]]) -> list[int]:
    """Return for each rank the lowest rank on its host.

    ``shared`` has, for each rank, the ranks with which it shares memory, itself among them. Ranks of one host all share
    memory with each other; where only some of them do, each counts as a host of its own.
    """
    return [min(ranks) if all(shared[other] == ranks for other in ranks) else rank for rank, ranks in enumerate(shared)]


def _name_of(entry: dict[str, Any]) -> str:
    host, host_id = str(entry["host"]), str(entry["host_id"])
    return f"{host} (PROCGROUP_HOST_ID {host_id})" if host_id else host
