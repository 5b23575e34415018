"""How two ranks prove to each other that they belong to one job, before anything else is believed.

::

    connector                                  acceptor
      magic, my rank, nonce C       ────────>
                                    <────────    nonce A, HMAC(key, "accept" C A ranks)
      HMAC(key, "connect" C A ranks) ───────>

``key`` is the job's data key, which both read from the store. Each proof covers both nonces (so neither
can be replayed) and both ranks (so a proof for one pair is worthless for another). HMAC is RFC 2104 with
SHA-256. All messages have fixed sizes, so nothing a stranger sends is ever allocated or parsed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

from procgroup.errors import DistNetworkError

_HELLO = struct.Struct("!8sI32s")
_MAGIC = b"procgrp1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class Refused(DistNetworkError):
    """The other side is not a rank of this job, or went away before it had shown that."""


def connect_to(connection: socket.socket, rank: int, peer: int, key: bytes) -> None:
    """Prove to ``peer`` that this is ``rank``, and make it prove the same; raises Refused."""
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_HELLO.pack(_MAGIC, rank, ours))
    reply = receive_exactly(connection, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"accept", ours, theirs, rank, peer)):
        raise Refused(f"rank {rank}: the process that answers for rank {peer} does not hold this job's key")
    connection.sendall(_proof(key, b"connect", ours, theirs, rank, peer))


def accept_from(connection: socket.socket, rank: int, key: bytes) -> int:
    """Make whoever connected prove to be a rank of this job; return which. Raises Refused."""
    magic, peer, theirs = _HELLO.unpack(receive_exactly(connection, _HELLO.size))
    if magic != _MAGIC:
        raise Refused(f"rank {rank}: a connection that does not speak this protocol")
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ours + _proof(key, b"accept", theirs, ours, peer, rank))
    proof = receive_exactly(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"connect", theirs, ours, peer, rank)):
        raise Refused(f"rank {rank}: a connection that does not hold this job's key")
    return int(peer)


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Read ``count`` bytes; raises Refused when the other side ends before."""
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise Refused("the other side closed the connection during the handshake")
        received += piece
    return bytes(received)


def remaining(deadline: float) -> float:
    """Seconds until a ``time.monotonic()`` deadline, at least a moment so that a socket stays usable."""
    return max(deadline - time.monotonic(), 0.001)


def _proof(key: bytes, role: bytes, connector: bytes, acceptor: bytes, connecting: int, accepting: int) -> bytes:
    ranks = struct.pack("!II", connecting, accepting)
    return hmac.digest(key, role + b"\0" + connector + acceptor + ranks, "sha256")
