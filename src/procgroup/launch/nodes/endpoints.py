"""Find the agents' store at one of the endpoints, or host it there.

A node owns an endpoint when the endpoint's address can be bound on it. Host names are never compared, and this host's
own name is never resolved, so it may map to 127.0.1.1 or to nothing. The agent that owns an endpoint hosts the store
there; a second agent on the same host finds the port taken and becomes a client.

Of several endpoints the first one that answers is used. The owner of a later endpoint hosts a store only when no
endpoint has answered for a while, which is longer for each place in the list. So agents that start together, or lose
their store together, use one store.
"""

from __future__ import annotations

import errno
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from procgroup.errors import DistNetworkError, StoreLost
from procgroup.launch.deadlines import (
    ENDPOINT_CONNECT_SECONDS,
    ENDPOINT_PAUSE_SECONDS,
    ENDPOINT_REPORT_SECONDS,
    FOREIGN_SECONDS,
    HANDSHAKE_SECONDS,
    TAKEOVER_SECONDS,
)
from procgroup.launch.output.sinks import say
from procgroup.stores import addresses
from procgroup.stores.store import Store
from procgroup.stores.tcp import StoreServer, TCPStore
from procgroup.types import Endpoint

_LOOPBACK = "127.0.0.1"
_LOOPBACK_PREFIXES = ("127.", "::1")
# Parts of the error of a store's client whose server has not answered in time: a stopped or ending process may still
# listen. Any other error means that the program there is not a store.
_NO_ANSWER = ("has timed out", "says nothing")


class FoundStore(NamedTuple):
    """A store of agents, connected: its endpoint, and the server when this process hosts it.

    ``is_on_server``: the store is on a database server, which may be silent for a while and go on, and not hosted by
    an agent.
    """

    store: Store
    endpoint: Endpoint | None
    server: StoreServer | None
    is_on_server: bool = False

    def address_here(self) -> str:
        """Return the address at which other hosts reach this one: that of its route to the store."""
        if self.endpoint is None:
            return addresses.outward_address() or _LOOPBACK
        if self.server is not None:
            return _LOOPBACK if self.endpoint.host == "localhost" else self.endpoint.host
        return source_address(self.endpoint)

    def close_after_clients(self, seconds: float) -> None:
        """Close the connections; a server in this process first waits at most so long for the other agents to leave.

        It does not wait for PyTorch's clients: the ranks have ended, and any other process can connect as such a
        client.
        """
        self.store.close()
        if self.server is not None:
            deadline = time.monotonic() + seconds
            while self.server.procgroup_clients and time.monotonic() < deadline:
                time.sleep(ENDPOINT_PAUSE_SECONDS / 10)
            self.server.close()


def find_store(
    endpoints: Sequence[Endpoint],
    stops: Callable[[], bool],
    *,
    is_host: bool | None = None,
    answers_torch: bool = False,
) -> FoundStore:
    """Connect to the agents' store, or host it here; wait without a limit.

    ``is_host`` says whether this node hosts the store (None: it does if it can bind the address). With
    ``answers_torch`` the server also answers PyTorch's clients at the same port, from a table of their own. Raises
    DistNetworkError when a program other than a store listens there, and once ``stops()`` returns True.
    """
    began = time.monotonic()
    names_are_checked = False
    while True:
        waited = time.monotonic() - began
        owners = [endpoint for place, endpoint in enumerate(endpoints) if waited >= place * TAKEOVER_SECONDS]
        hosting = partial(_host_one, owners if is_host is not False else [], is_host, answers_torch)
        # A sole endpoint whose port is free has no store yet. Of several, another host's may have it: look first.
        found = hosting() if len(endpoints) == 1 else None
        try:
            found = found or next(connect_each(endpoints), None)
        except DistNetworkError:
            if waited >= FOREIGN_SECONDS:
                raise
        found = found or hosting()
        if found is not None:
            return found
        if stops():
            raise DistNetworkError(f"no agent hosts the store at {', '.join(map(str, endpoints))}")
        if waited >= ENDPOINT_REPORT_SECONDS and not names_are_checked:
            names_are_checked = True
            for host, _ in endpoints:
                if not addresses.resolve(host, ENDPOINT_CONNECT_SECONDS):
                    say(f"the host name {host} has no address here yet: check its spelling, or give an address")
        time.sleep(ENDPOINT_PAUSE_SECONDS)


def connect_each(endpoints: Sequence[Endpoint]) -> Iterator[FoundStore]:
    """Connect to the stores at those endpoints that answer, in order.

    Raises DistNetworkError for an endpoint that is not a store, or has another secret.
    """
    for endpoint in _answering(endpoints):
        try:
            store = TCPStore(endpoint.host, endpoint.port, timeout=HANDSHAKE_SECONDS, wait_for_workers=False)
        except DistNetworkError as error:
            if not any(words in str(error) for words in _NO_ANSWER):
                raise
        else:
            yield FoundStore(store, endpoint, None)


def _answering(endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """Return the endpoints that accept connections; all are tried at once."""
    if len(endpoints) == 1:
        return list(endpoints)
    from concurrent.futures import ThreadPoolExecutor  # needed for lists only; the import takes some milliseconds

    with ThreadPoolExecutor(len(endpoints)) as pool:
        return [endpoint for endpoint, answers in zip(endpoints, pool.map(_answers, endpoints), strict=True) if answers]


def _answers(endpoint: Endpoint) -> bool:
    for address in addresses.resolve(endpoint.host, ENDPOINT_CONNECT_SECONDS):
        with suppress(OSError), socket.create_connection((address, endpoint.port), ENDPOINT_CONNECT_SECONDS):
            return True
    return False


def _host_one(owners: Sequence[Endpoint], is_host: bool | None, answers_torch: bool) -> FoundStore | None:
    """Host the store at the first endpoint that this host owns and whose port is free; None where there is none."""
    for endpoint in owners:
        listener = _listen(endpoint, is_host)
        if listener is not None:
            server = StoreServer(
                endpoint.host,
                endpoint.port,
                listen_fd=listener.detach(),
                job="",
                warns_keyless=False,
                answers_torch=answers_torch,
            )
            if server.is_open_to_anybody:
                say(
                    f"the agents meet at port {server.port} without a secret, so whoever can connect to it can read "
                    "and change the state of the job: set PROCGROUP_JOB_KEY to one secret (hex) on every node"
                )
            store = TCPStore(server.addresses[0], server.port, wait_for_workers=False)
            return FoundStore(store, Endpoint(endpoint.host, server.port), server)
    return None


def _listen(endpoint: Endpoint, is_host: bool | None) -> socket.socket | None:
    listen = addresses.listen if is_host else addresses.listen_if_local
    try:
        return listen(endpoint.host, endpoint.port)
    except DistNetworkError as error:
        if errno.errorcode[errno.EADDRINUSE] in str(error):
            return None
        raise


def use_server(open_store: Callable[[], Store], servers: Sequence[Endpoint], stops: Callable[[], bool]) -> FoundStore:
    """Connect to the agents' store on a server, or cluster of servers, of its own; wait without a limit.

    The first error is printed once. Raises DistNetworkError once ``stops()`` returns True.
    """
    say_at = time.monotonic() + ENDPOINT_REPORT_SECONDS
    while True:
        try:
            return FoundStore(open_store(), _outward(servers), None, is_on_server=True)
        except (DistNetworkError, StoreLost) as error:
            if stops():
                raise
            if time.monotonic() >= say_at:
                say_at = math.inf
                say(f"cannot reach the agents' store yet: {error}")
            time.sleep(ENDPOINT_PAUSE_SECONDS)


def _outward(servers: Sequence[Endpoint]) -> Endpoint:
    """Return the first server to which this host has a route with a non-loopback address; else the first server.

    A host may name its own server by a loopback address, and the name of a lost host may have no address.
    """
    return next((each for each in servers if not source_address(each).startswith(_LOOPBACK_PREFIXES)), servers[0])


def share_file(path: str, stops: Callable[[], bool]) -> FoundStore:
    """Return the agents' store in a file that all nodes can open."""
    from procgroup.stores.file import FileStore

    return FoundStore(FileStore(path), None, None)


def source_address(endpoint: Endpoint) -> str:
    """Return this host's address on the route to an endpoint; the loopback address where there is no route."""
    return addresses.source_address(endpoint.host, endpoint.port, ENDPOINT_CONNECT_SECONDS) or _LOOPBACK
