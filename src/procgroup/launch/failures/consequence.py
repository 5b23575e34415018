"""Decide whether an error only follows from the end of another rank, and which rank it names as the cause."""

from __future__ import annotations

import re

EXCEPTION_LINE = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?(?P<name>[A-Za-z_]\w*)(?:: .*)?$")

_OF_PEERS = frozenset({"PeerLost", "PeerFailed", "GroupBroken", "StoreLost"})
# Gloo, NCCL and torch's TCPStore have no exception type for a lost peer; only these texts show one.
_OF_TORCH = frozenset({"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
_LOST_CONNECTION = re.compile(
    "connection closed by (?:remote )?peer|connection reset by peer|broken pipe|remote process exit"
    "|connection was likely closed",
    re.IGNORECASE,
)
# The operating system's errors for a connection that ended; PeerLost and the like are raised while handling them.
_OF_CONNECTIONS = frozenset({"ConnectionResetError", "BrokenPipeError", "ConnectionAbortedError", "EOFError"})
_BLAMED = re.compile(r"\blost rank (\d+)|\brank (\d+)(?: \([^)]*\))? failed\b")


def exception_name(message: str) -> str:
    """Return the class of ``Type: message``, without its module; "" for another text."""
    match = EXCEPTION_LINE.match(message.partition("\n")[0])
    return match["name"] if match else ""


def is_consequence(chain: list[str]) -> bool:
    """Return whether the chained exceptions of one rank, in the order raised, follow from another rank's end.

    The first exception decides: an error raised while a lost peer is handled is a consequence, too; a peer that is lost
    while an error of this rank is handled is not the cause.
    """
    causes = [message for message in chain if exception_name(message) not in _OF_CONNECTIONS]
    return bool(causes) and says_peer_lost(causes[0])


def says_peer_lost(message: str) -> bool:
    """Return whether ``Type: message`` says that another rank, the store or the connection to one of them has ended."""
    name = exception_name(message)
    return name in _OF_PEERS or (name in _OF_TORCH and says_connection_lost(message))


def says_connection_lost(text: str) -> bool:
    """Return whether a text contains an error of Gloo, NCCL or torch's store for a peer that has ended."""
    return _LOST_CONNECTION.search(text) is not None


def blamed_rank(message: str) -> int | None:
    """Return the global rank that an error of a lost or failed peer names as the cause; None when it names none."""
    match = _BLAMED.search(message) if exception_name(message) in _OF_PEERS else None
    return int(match[1] or match[2]) if match else None
