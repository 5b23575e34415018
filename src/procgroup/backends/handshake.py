"""How two ranks prove to each other that they belong to one job, before they trust any other data.

::

    connector                                  acceptor
      magic, own rank, nonce C      ────────>
                                    <────────    nonce A, HMAC(key, "accept" C A ranks)
      HMAC(key, "connect" C A ranks) ───────>

``key`` is the job's data key, which both read from the store. Each proof covers both nonces (so neither
can be replayed) and both ranks (so a proof for one pair is worthless for another). HMAC is RFC 2104 with
SHA-256. All messages have fixed sizes, so no data of an unproven peer is allocated or parsed.

The functions here are generators over sockets that do not block: each yields the selector events
(EVENT_READ or EVENT_WRITE) for which its socket must be ready before it can go on, and returns its result.
So one thread can drive any number of handshakes at once.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Generator
from selectors import EVENT_READ, EVENT_WRITE
from typing import TypeVar

from procgroup.errors import CutShort, Refused

T = TypeVar("T")
Steps = Generator[int, None, T]
"""A part of a handshake that yields what its socket must be ready for next."""

_HELLO = struct.Struct("!8sI32s")
_MAGIC = b"procgrp3"
_NONCE_BYTES = 32
_PROOF_BYTES = 32


def connect_to(connection: socket.socket, rank: int, peer: int, key: bytes) -> Steps[None]:
    """Prove to ``peer`` that this is ``rank``, and make it prove the same; raises Refused."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    yield from send_all(connection, _HELLO.pack(_MAGIC, rank, ours))
    reply = yield from receive_exactly(connection, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"accept", ours, theirs, rank, peer)):
        raise Refused(f"rank {rank}: the process that answers for rank {peer} does not hold this job's key")
    yield from send_all(connection, _proof(key, b"connect", ours, theirs, rank, peer))


def accept_from(connection: socket.socket, rank: int, key: bytes) -> Steps[int]:
    """Make the connecting process prove that it is a rank of this job; return its rank. Raises Refused."""
    magic, peer, theirs = _HELLO.unpack((yield from receive_exactly(connection, _HELLO.size)))
    if magic != _MAGIC:
        raise Refused(f"rank {rank}: a connection that does not speak this protocol")
    ours = secrets.token_bytes(_NONCE_BYTES)
    yield from send_all(connection, ours + _proof(key, b"accept", theirs, ours, peer, rank))
    proof = yield from receive_exactly(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"connect", theirs, ours, peer, rank)):
        raise Refused(f"rank {rank}: a connection that does not hold this job's key")
    return int(peer)


def send_all(connection: socket.socket, data: bytes) -> Steps[None]:
    """Send all of ``data``."""
    while data:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            yield EVENT_WRITE


def receive_exactly(connection: socket.socket, count: int) -> Steps[bytes]:
    """Read ``count`` bytes; raises CutShort when the other side ends before."""
    received = bytearray()
    while len(received) < count:
        try:
            chunk = connection.recv(count - len(received))
        except BlockingIOError:
            yield EVENT_READ
            continue
        if not chunk:
            raise CutShort("the other side closed the connection during the handshake")
        received += chunk
    return bytes(received)


def _proof(key: bytes, role: bytes, connector: bytes, acceptor: bytes, connecting: int, accepting: int) -> bytes:
    ranks = struct.pack("!II", connecting, accepting)
    return hmac.digest(key, role + b"\0" + connector + acceptor + ranks, "sha256")
