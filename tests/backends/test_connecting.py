"""How the ranks of a group connect when some are late, stopped or out of luck, and with strangers in between.

The ranks are threads with sockets of their own; a rank that misbehaves is played by hand.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from procgroup.backends import connecting, peer_network
from procgroup.backends.connecting import Details, PeerConnection, connect_all
from procgroup.backends.handshake import _HELLO, _MAGIC, _proof
from procgroup.backends.peer_network import Route, hosts_of
from procgroup.errors import DistNetworkError, Refused, StoreLost
from procgroup.stores.hash import HashStore
from procgroup.stores.start_up import Member, StartUp

KEY = b"k" * 32
LIMIT = 20.0
SOON = 10.0


def in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
    """Run a function in a thread of its own; its result or error comes back by the future."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **named))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def arenas(count: int) -> Iterator[list[int]]:
    descriptors = [os.memfd_create(f"arena {rank}") for rank in range(count)]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def connect(store: HashStore, rank: int, size: int, arena: int | None, limit: float = LIMIT) -> Any:
    """Connect as one rank does: over Unix sockets with an arena, over TCP without one."""
    me = Member(rank, size, "host", os.getpid(), f"nonce {rank}")
    start_up = StartUp(store, me, group="0", timeout=limit, deadline=time.monotonic() + limit)
    start_up.enter("start")
    route = Route("127.0.0.1", "127.0.0.1", "127.0.0.1") if arena is None else None
    offered = None if arena is None else (arena, arena, arena)
    return peer_network.connect(start_up, KEY, Details(64 * rank, offered), route).connections


def address_of(store: HashStore, rank: int, arena: int | None) -> tuple[int, Any]:
    """Wait until a rank has published where it listens; return the address family and the address."""
    import json

    entry = json.loads(store.get(f"start/links/{rank}", 10))
    if arena is None:
        return socket.AF_INET, tuple(entry["tcp"])
    return socket.AF_UNIX, b"\0" + entry["unix"].encode()


def peers(connections: list[PeerConnection]) -> list[int]:
    """Return who is at the other ends, and close these."""
    assert not isinstance(connections, str), connections
    ranks = [connection.peer for connection in connections]
    for connection in connections:
        connection.close()
    return ranks


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_strangers_that_connect_and_say_nothing_delay_nobody(transport: str) -> None:
    store = HashStore()
    with arenas(3) as descriptors, ExitStack() as stack:
        own: list[int | None] = [None] * 3 if transport == "tcp" else list(descriptors)
        ranks = [in_thread(connect, store, rank, 3, own[rank]) for rank in (0, 1)]
        for rank in (0, 1):  # they accept when the last rank has published its address, not before
            family, address = address_of(store, rank, own[rank])
            for number in range(12):
                stranger = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                stranger.connect(address)
                if number % 2 == 0:
                    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n"[:number])
        started = time.monotonic()
        ranks.append(in_thread(connect, store, 2, 3, own[2]))
        assert [peers(rank.result(LIMIT)) for rank in ranks] == [[1, 2], [0, 2], [0, 1]]
        assert time.monotonic() - started < SOON


def test_a_rank_that_fails_stops_those_who_wait_for_its_answer() -> None:
    store = HashStore()
    started = time.monotonic()
    with arenas(3) as descriptors:
        ranks = [in_thread(connect, store, rank, 3, -1 if rank == 1 else descriptors[rank]) for rank in range(3)]
        for rank in ranks:  # rank 1 has no arena that could be sent
            with pytest.raises(DistNetworkError, match="Bad file descriptor"):
                rank.result(2 * LIMIT)
    assert time.monotonic() - started < SOON


class LostOnceConnected(HashStore):
    """A store that is lost when the ranks have connected and tell each other so."""

    def set(self, key: str, value: str | bytes) -> None:
        if "/verdict/" in key:
            raise StoreLost(host="localhost", port=1, reason="it has ended")
        super().set(key, value)


def open_files() -> set[tuple[str, str]]:
    """Return the descriptors of this process, each with what it is of."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
    return found


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_start_that_fails_after_the_ranks_have_connected_leaves_no_connection_open(transport: str) -> None:
    store = LostOnceConnected()
    with arenas(2) as descriptors:
        before = open_files()
        ranks = [
            in_thread(connect, store, rank, 2, descriptors[rank] if transport == "unix" else None) for rank in (0, 1)
        ]
        errors = [rank.exception(LIMIT) for rank in ranks]  # which hold all that their frames hold
        assert [type(error) for error in errors] == [StoreLost] * 2
        left_open = open_files() - before
        assert left_open == set()


class Ranks:
    """Ranks that are driven by connect_all() itself: what they publish is in the test's hands."""

    def __init__(self, size: int, backlog: int = 128) -> None:
        self.size = size
        self.listeners = []
        self.addresses: list[Any] = []
        for rank in range(size):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.addresses.append(f"procgroup-test-{os.getpid()}-{id(self)}-{rank}")
            listener.bind(b"\0" + self.addresses[rank].encode())
            listener.listen(backlog)
            self.listeners.append(listener)
        self.looked = [threading.Event() for _ in range(size)]
        self.met = [threading.Semaphore(0) for _ in range(size)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self.listeners:
            listener.close()

    def connect(self, rank: int, arena: int, limit: float = LIMIT) -> list[PeerConnection]:
        """Connect as ``rank``; ``looked`` is set at its first look at the store, ``met`` counts its handshakes."""
        met = self.met[rank]

        class Noted(Details):
            def exchange(self, connection: socket.socket, peer: int) -> Any:
                found = yield from super().exchange(connection, peer)
                met.release()
                return found

        return connect_all(
            rank,
            self.size,
            [self.listeners[rank]],
            [[address] for address in self.addresses],
            key=KEY,
            details=Noted(64 * rank, (arena, arena, arena)),
            deadline=time.monotonic() + limit,
            look=self.looked[rank].set,
        )

    def dial(self, rank: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(LIMIT)
        connection.connect(b"\0" + self.addresses[rank].encode())
        return connection


def test_a_full_queue_delays_a_rank_and_does_not_fail_it() -> None:
    with Ranks(2, backlog=0) as ranks, arenas(2) as descriptors, ExitStack() as stack:
        with suppress(BlockingIOError):
            while True:
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                stranger.setblocking(False)
                stranger.connect(b"\0" + ranks.addresses[0].encode())
        connector = in_thread(ranks.connect, 1, descriptors[1])
        assert ranks.looked[1].wait(SOON)  # it has tried by now
        assert not connector.done()
        acceptor = in_thread(ranks.connect, 0, descriptors[0])
        assert [peers(one.result(LIMIT)) for one in (acceptor, connector)] == [[1], [0]]


def test_a_full_queue_is_named_at_the_deadline() -> None:
    late = pytest.raises(Refused, match=r"ranks \[0\] in time.*not reached: Resource temporarily unavailable")
    with Ranks(2, backlog=0) as ranks, arenas(2) as descriptors, ranks.dial(0), late:
        ranks.connect(1, descriptors[1], limit=0.4)


def test_ranks_connect_with_each_other_while_another_is_late() -> None:
    with Ranks(3) as ranks, arenas(3) as descriptors:
        others = [in_thread(ranks.connect, rank, descriptors[rank]) for rank in (1, 2)]
        for rank in (1, 2):
            assert ranks.met[rank].acquire(timeout=SOON), f"rank {rank} waits for rank 0"
        late = in_thread(ranks.connect, 0, descriptors[0])
        assert [peers(one.result(LIMIT)) for one in (late, *others)] == [[1, 2], [0, 2], [0, 1]]


def test_nobody_listening_is_an_error_at_once() -> None:
    with Ranks(2) as ranks, arenas(2) as descriptors:
        ranks.listeners[0].close()
        with pytest.raises(Refused, match="rank 0 at procgroup-test-.* was not reached: Connection refused"):
            ranks.connect(1, descriptors[1])
        assert not ranks.looked[1].is_set()


def say_hello(connection: socket.socket, rank: int) -> bytes:
    """Begin the handshake of a connector by hand; return the proof that it has to send."""
    ours = b"n" * 32
    connection.sendall(_HELLO.pack(_MAGIC, rank, ours))
    theirs = connection.recv(64, socket.MSG_WAITALL)[:32]
    return _proof(KEY, b"connect", ours, theirs, rank, 0)


# The limit that a handshake used to have was shorter than the longer pause.
@pytest.mark.parametrize("pause", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_connector_that_is_stopped_in_its_handshake_can_end_it_later(pause: float) -> None:
    with Ranks(3) as ranks, arenas(3) as descriptors, ranks.dial(0) as connection:
        acceptor = in_thread(ranks.connect, 0, descriptors[0])
        proof = say_hello(connection, 1)
        other = in_thread(ranks.connect, 2, descriptors[2])
        assert ranks.met[2].acquire(timeout=SOON), "rank 2 waits for rank 1"
        time.sleep(pause)
        connection.sendall(proof)
        socket.send_fds(connection, [struct.pack("!QQ", os.getpid(), 64)], [descriptors[1]] * 3)
        assert peers(acceptor.result(LIMIT)) == [1, 2]
        waiting = ranks.dial(1)  # rank 2 waits for rank 1's listener, at which nobody accepts
        waiting.close()
        ranks.listeners[1].close()
        with pytest.raises(Refused):
            other.result(LIMIT)


def test_an_attempt_that_the_acceptor_closed_is_made_again() -> None:
    with Ranks(2) as ranks, arenas(2) as descriptors:
        connector = in_thread(ranks.connect, 1, descriptors[1])
        for received in (0, 1, 44):  # before, in and after the first message
            connection, _ = ranks.listeners[0].accept()
            with connection:
                connection.recv(received, socket.MSG_WAITALL)
        acceptor = in_thread(ranks.connect, 0, descriptors[0])
        assert [peers(one.result(LIMIT)) for one in (acceptor, connector)] == [[1], [0]]


def test_a_rank_that_connects_again_takes_the_place_of_its_first_connection() -> None:
    with Ranks(3) as ranks, arenas(3) as descriptors, ranks.dial(0) as first:
        acceptor = in_thread(ranks.connect, 0, descriptors[0])
        first.sendall(say_hello(first, 2))
        socket.send_fds(first, [struct.pack("!QQ", os.getpid(), 1)], [descriptors[2]] * 3)
        assert ranks.met[0].acquire(timeout=SOON)
        again = in_thread(ranks.connect, 2, descriptors[2])
        assert ranks.met[0].acquire(timeout=SOON)
        other = in_thread(ranks.connect, 1, descriptors[1])
        found = acceptor.result(LIMIT)
        assert [connection.offset for connection in found] == [64, 128]
        assert peers(found) == [1, 2]
        assert [peers(one.result(LIMIT)) for one in (other, again)] == [[0, 2], [0, 1]]


def test_too_many_strangers_cost_the_oldest_attempt_and_its_rank_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "_STRANGERS", 0)
    with Ranks(2) as ranks, arenas(2) as descriptors, ExitStack() as stack:
        evicted = stack.enter_context(ranks.dial(0))
        acceptor = in_thread(ranks.connect, 0, descriptors[0])
        say_hello(evicted, 1)
        for _ in range(2 * ranks.size):
            stack.enter_context(ranks.dial(0))
        assert evicted.recv(1) == b""
        connector = in_thread(ranks.connect, 1, descriptors[1])
        assert [peers(one.result(LIMIT)) for one in (acceptor, connector)] == [[1], [0]]


class NoDescriptors(socket.socket):
    """A listener for which accept() finds no free descriptor while ``short`` is set."""

    short = True

    def accept(self) -> Any:
        if self.short:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_without_descriptors_strangers_are_closed_first_and_then_it_is_an_error() -> None:
    with Ranks(2) as ranks, arenas(2) as descriptors, ranks.dial(0) as stranger:
        listener = NoDescriptors(fileno=ranks.listeners[0].detach())
        listener.short = False
        ranks.listeners[0] = listener
        acceptor = in_thread(ranks.connect, 0, descriptors[0])
        assert ranks.looked[0].wait(SOON)  # the stranger has been accepted by now
        listener.short = True
        with ranks.dial(0), pytest.raises(OSError, match="Too many open files"):
            acceptor.result(LIMIT)
        assert stranger.recv(1) == b""


def test_a_rank_that_shares_no_memory_is_reached_at_its_next_address() -> None:
    store = HashStore()
    route = Route("127.0.0.1", "127.0.0.1", "127.0.0.1")

    def join(rank: int, arena: tuple[int, int, int] | None) -> Any:
        me = Member(rank, 3, "host", os.getpid(), f"nonce {rank}")
        start_up = StartUp(store, me, group="0", timeout=LIMIT, deadline=time.monotonic() + LIMIT)
        start_up.enter("start")
        return peer_network.connect(start_up, KEY, Details(0, arena), route, "" if arena else "no memory")

    with arenas(3) as descriptors:
        offers = [(descriptors[0],) * 3, None, (descriptors[2],) * 3]
        ranks = [in_thread(join, rank, offers[rank]) for rank in range(3)]
        links = [rank.result(LIMIT) for rank in ranks]
    for rank, link in enumerate(links):
        assert link.hosts == [0, 1, 0]
        assert link.problem == "rank 1: no memory"
        shared = [one.peer for one in link.connections if one.arena is not None]
        assert shared == {0: [2], 1: [], 2: [0]}[rank]
        peers(link.connections)


def test_an_address_on_another_host_is_passed_over_for_the_next_one() -> None:
    with Ranks(2) as ranks, arenas(2) as descriptors, socket.create_server(("127.0.0.1", 0)) as listener:
        elsewhere = f"procgroup-test-{os.getpid()}-nobody-listens-here"  # as in another network namespace
        addresses = [[elsewhere, list(listener.getsockname())], [ranks.addresses[1]]]

        def join(rank: int, listeners: list[socket.socket]) -> list[PeerConnection]:
            details = Details(0, (descriptors[rank],) * 3)
            return connect_all(
                rank, 2, listeners, addresses, key=KEY, details=details, deadline=time.monotonic() + LIMIT, look=str
            )

        both = [in_thread(join, 0, [ranks.listeners[0], listener]), in_thread(join, 1, [ranks.listeners[1]])]
        found = [one.result(LIMIT) for one in both]
        assert [connection.arena for (connection,) in found] == [None, None]
        assert [peers(one) for one in found] == [[1], [0]]


def test_a_host_is_a_set_of_ranks_that_all_share_memory_with_each_other() -> None:
    assert hosts_of([[0, 1, 2]] * 3) == [0, 0, 0]
    assert hosts_of([[0, 2], [1, 3], [0, 2], [1, 3]]) == [0, 1, 0, 1]
    assert hosts_of([[0], [1], [2]]) == [0, 1, 2]
    assert hosts_of([[0, 1], [0, 1, 2], [1, 2]]) == [0, 1, 2]  # ranks 0 and 2 could not share
