"""Connects one rank with every other rank of a group, all at the same time.

::

    to every lower rank      connect to its Unix socket, or, from another host, over TCP; again when it was cut short
    from every higher rank   accept all connections; keep those of proven ranks
    both                     the handshake, then the details: process id, and the arena over a Unix socket

An *attempt* is one connection whose handshake has not ended. No socket blocks, and one selector drives all
attempts side by side. So a rank that is late or stopped, and a process outside the job that connects and sends
nothing, delay no other rank. A handshake has no timeout of its own: under load a rank may not be scheduled for
seconds. The number of attempts is limited instead: beyond it, or without descriptors, the oldest one is closed,
and its rank connects again.

An error of ``connect`` ends an address only when it is final. ECONNREFUSED is: a rank publishes its addresses after
it has begun to listen, so either that process has ended, or (an abstract Unix address) the rank is on another
host or in another network namespace; then its next address is tried. EAGAIN is not: the listener's queue is full.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from procgroup.backends.handshake import Steps, accept_from, connect_to, receive_exactly, send_all
from procgroup.errors import CutShort, Refused

Address = str | list[Any]
"""The name of an abstract Unix socket, or a literal host and a port."""

_DETAILS = struct.Struct("!QQ")
_LOOK_SECONDS = 0.2
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.2
_STRANGERS = 64
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PASSING = (
    errno.EAGAIN,  # the listener's queue is full, or no local port is free
    errno.EADDRNOTAVAIL,  # no local port is free
    errno.EINTR,
    errno.ECONNRESET,  # the acceptor closed the attempt
    errno.EPIPE,
    errno.ECONNABORTED,
    errno.ETIMEDOUT,  # the host did not answer
)


class PeerConnection(NamedTuple):
    """A proven connection to one rank: its socket and, when it shares memory, its arena."""

    peer: int
    socket: socket.socket
    pid: int
    offset: int
    arena: tuple[int, int, int] | None
    """The descriptors of its memory, of its eventfd and of its flight record."""

    def close(self) -> None:
        """Close the socket and the arena's descriptors."""
        self.socket.close()
        for descriptor in self.arena or ():
            os.close(descriptor)


class Details(NamedTuple):
    """The data that two ranks exchange after the handshake; over a Unix socket, their arenas, too."""

    offset: int
    arena: tuple[int, int, int] | None

    def exchange(self, connection: socket.socket, peer: int) -> Steps[PeerConnection]:
        """Send this rank's details and receive those of ``peer``."""
        shared = connection.family == socket.AF_UNIX
        message = _DETAILS.pack(os.getpid(), self.offset)
        while shared and self.arena is not None:
            try:
                message = message[socket.send_fds(connection, [message], self.arena) :]
                break
            except BlockingIOError:
                yield selectors.EVENT_WRITE
        yield from send_all(connection, message)
        if not shared:
            pid, offset = _DETAILS.unpack((yield from receive_exactly(connection, _DETAILS.size)))
            return PeerConnection(peer, connection, pid, offset, None)
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(connection, _DETAILS.size, 3, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                yield selectors.EVENT_READ
        if not message:
            raise CutShort("the other side closed the connection during the handshake")
        if len(descriptors) != 3 or len(message) != _DETAILS.size:
            for descriptor in descriptors:
                os.close(descriptor)
            raise Refused(f"rank {peer} sent no arena")
        pid, offset = _DETAILS.unpack(message)
        return PeerConnection(peer, connection, pid, offset, (descriptors[0], descriptors[1], descriptors[2]))


def connect_all(
    rank: int,
    size: int,
    listeners: Sequence[socket.socket],
    addresses: Sequence[Sequence[Address]],
    *,
    key: bytes,
    details: Details,
    deadline: float,
    look: Callable[[], None],
) -> list[PeerConnection]:
    """Connect this rank with every other one; return one connection for each, in the order of the ranks.

    ``addresses`` has the addresses of each rank, in the order in which this rank tries them; this rank listens at
    ``listeners``. ``look`` is called at intervals, to raise errors that another rank has reported.
    Raises Refused when a rank cannot be reached, does not hold ``key``, or has not connected by ``deadline``, a
    time.monotonic().
    """
    connecting = _Connecting(rank, size, listeners, addresses, key, details)
    next_look = time.monotonic() + _LOOK_SECONDS
    try:
        while True:
            connecting.begin_due()
            if len(connecting.connections) == size - 1:
                connections = [connecting.connections[peer] for peer in sorted(connecting.connections)]
                connecting.connections = {}
                return connections
            connecting.advance_ready(min(next_look, deadline, *connecting.due.values()))
            now = time.monotonic()
            if now >= deadline:
                raise Refused(connecting.lateness())
            if now >= next_look:
                look()
                next_look = time.monotonic() + _LOOK_SECONDS
    finally:
        connecting.close()


class _Attempt:
    """A connection whose handshake has not ended; ``peer`` is None where this rank accepted it."""

    def __init__(self, connection: socket.socket, peer: int | None) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.peer = peer
        self.is_proven = False  # accepted attempts: the connecting rank may already regard it as complete


class _Connecting:
    """Every attempt of one rank, and the connections that they have become."""

    def __init__(
        self,
        rank: int,
        size: int,
        listeners: Sequence[socket.socket],
        addresses: Sequence[Sequence[Address]],
        key: bytes,
        details: Details,
    ) -> None:
        self._rank = rank
        self._size = size
        self._addresses = [list(of_rank) for of_rank in addresses]  # the first of each is being tried
        self._key = key
        self._details = details
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        self._attempts: dict[_Attempt, Steps[PeerConnection]] = {}  # oldest first
        self.connections: dict[int, PeerConnection] = {}
        self._pauses: dict[int, float] = {}  # of ranks to which an attempt was cut short
        self.due: dict[int, float] = dict.fromkeys(range(rank), 0.0)
        self._problems: dict[int, str] = {}
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Close every attempt, and every connection that was not handed out."""
        for attempt in list(self._attempts):
            self._drop(attempt)
        for connection in self.connections.values():
            connection.close()
        self._selector.close()

    def advance_ready(self, until: float) -> None:
        """Wait for sockets until a time.monotonic(); accept connections and advance the attempts that can go on."""
        for ready, _ in self._selector.select(max(until - time.monotonic(), 0.0)):
            if ready.fileobj in self._listeners:
                self._accept(cast(socket.socket, ready.fileobj))
            elif ready.data in self._attempts:
                self._advance(ready.data)

    def begin_due(self) -> None:
        """Connect to the ranks whose time has come."""
        now = time.monotonic()
        for peer in [peer for peer, due in self.due.items() if due <= now]:
            del self.due[peer]
            address = self._addresses[peer][0]
            family = socket.AF_UNIX if isinstance(address, str) else family_of(address[0])
            attempt = _Attempt(socket.socket(family, socket.SOCK_STREAM), peer)
            self._attempts[attempt] = self._connect(attempt.socket, peer)
            self._advance(attempt)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # the other side has closed it already
                if not self._drop_oldest():
                    raise
                continue
            if len(self._attempts) >= 2 * self._size + _STRANGERS:
                self._drop_oldest()
            attempt = _Attempt(connection, None)
            self._attempts[attempt] = self._answer(attempt)
            self._advance(attempt)

    def _advance(self, attempt: _Attempt) -> None:
        try:
            events = next(self._attempts[attempt])
        except StopIteration as done:
            self._forget(attempt)
            connection: PeerConnection = done.value
            # A rank that connects again lost its first connection before it knew that this side had accepted it.
            if connection.peer in self.connections:
                self.connections[connection.peer].close()
            self.connections[connection.peer] = connection
        except (OSError, Refused) as error:
            self._drop(attempt)
            if attempt.peer is not None:
                self._try_again(attempt.peer, error)
            elif attempt.is_proven and not _is_passing(error):
                raise
        else:
            if attempt.socket in self._selector.get_map():
                self._selector.modify(attempt.socket, events, attempt)
            else:
                self._selector.register(attempt.socket, events, attempt)

    def _connect(self, connection: socket.socket, peer: int) -> Steps[PeerConnection]:
        address = self._addresses[peer][0]
        number = connection.connect_ex(b"\0" + address.encode() if isinstance(address, str) else tuple(address))
        if number == errno.EINPROGRESS:
            yield selectors.EVENT_WRITE
            number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number != 0:
            raise OSError(number, os.strerror(number))
        yield from connect_to(connection, self._rank, peer, self._key)
        return (yield from self._details.exchange(connection, peer))

    def _answer(self, attempt: _Attempt) -> Steps[PeerConnection]:
        peer = yield from accept_from(attempt.socket, self._rank, self._key)
        if not self._rank < peer < self._size:
            raise Refused(f"rank {self._rank} expects no connection from rank {peer}")
        attempt.is_proven = True
        return (yield from self._details.exchange(attempt.socket, peer))

    def _try_again(self, peer: int, error: OSError | Refused) -> None:
        is_passing = _is_passing(error)
        if isinstance(error, Refused) and not is_passing:
            raise error
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self._problems[peer] = f"rank {peer} at {self._addresses[peer][0]} was not reached: {text}"
        if not is_passing:
            if len(self._addresses[peer]) == 1:
                raise Refused(self._problems[peer]) from error
            del self._addresses[peer][0]
            self.due[peer] = 0.0
            return
        pause = self._pauses.get(peer, _FIRST_PAUSE_SECONDS)
        self._pauses[peer] = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self.due[peer] = time.monotonic() + pause

    def lateness(self) -> str:
        missing = [peer for peer in range(self._size) if peer != self._rank and peer not in self.connections]
        problems = [self._problems[peer] for peer in missing if peer in self._problems]
        return "; ".join([f"no connection with ranks {missing} in time", *problems])

    def _drop_oldest(self) -> bool:
        """Close the oldest attempt without a proof; return whether there was one."""
        oldest = next((one for one in self._attempts if one.peer is None and not one.is_proven), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, attempt: _Attempt) -> None:
        steps = self._forget(attempt)
        steps.close()
        attempt.socket.close()

    def _forget(self, attempt: _Attempt) -> Steps[PeerConnection]:
        with suppress(KeyError):
            self._selector.unregister(attempt.socket)
        return self._attempts.pop(attempt)


def _is_passing(error: OSError | Refused) -> bool:
    return isinstance(error, CutShort) or (isinstance(error, OSError) and error.errno in _PASSING)


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family of a literal address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
