"""Tell by its output whether a program failed only because another rank had ended, where procgroup did not see that.

Ranks of procgroup leave a record, which says so of procgroup's own errors (see error_file.py). Gloo, NCCL and torch's
TCPStore have no type of exception for a lost peer, and torch's error file has no field for it: only their texts show
one. They are read here, and nowhere else.
"""

from __future__ import annotations

import re

EXCEPTION_LINE = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?(?P<name>[A-Za-z_]\w*)(?:: .*)?$")

_OF_TORCH = frozenset({"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError"})
_LOST_CONNECTION = re.compile(
    "connection closed by (?:remote )?peer|connection reset by peer|broken pipe|remote process exit"
    "|connection was likely closed",
    re.IGNORECASE,
)
# The operating system's errors for a connection that ended; torch's may be raised while handling them.
_OF_CONNECTIONS = frozenset({"ConnectionResetError", "BrokenPipeError", "ConnectionAbortedError", "EOFError"})


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
    """Return whether ``Type: message`` is one of torch's, and says that a connection to another process has ended."""
    return exception_name(message) in _OF_TORCH and says_connection_lost(message)


def says_connection_lost(text: str) -> bool:
    """Return whether a text contains an error of Gloo, NCCL or torch's store for a peer that has ended."""
    return _LOST_CONNECTION.search(text) is not None
