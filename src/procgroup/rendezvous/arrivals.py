"""Which ranks of one host have come to a start whose launcher does not say: each shows a Unix socket while it waits.

A rank connects to the sockets of the others when it comes, and to those that it lacks when its time has passed. Of two
ranks the later one so finds the earlier one, and the earlier one finds the later one as long as that waits, too. The
end of a connection shows the end of a process. The addresses are abstract: no file is left behind.
"""

from __future__ import annotations

import hashlib
import socket
from contextlib import suppress

_BACKLOG = 128


class Arrivals:
    """The ranks of the launcher's ``job`` that have come, as ``rank`` of ``size`` sees them from now on."""

    def __init__(self, job: str, rank: int, size: int) -> None:
        self._job = hashlib.sha256(job.encode()).hexdigest()[:20]
        self._others = [other for other in range(size) if other != rank]
        self._found: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(OSError):  # without it, the others take this rank for one that is missing
            self._listener.bind(self._address(rank))
            self._listener.listen(_BACKLOG)
        self._look()

    def missing(self) -> list[int]:
        """Return the ranks that have never come, or else those that have come and whose processes have ended."""
        self._look()
        never_came = [other for other in self._others if other not in self._found]
        return never_came or [other for other, connection in self._found.items() if _has_ended(connection)]

    def close(self) -> None:
        """Show no more that this rank has come."""
        for one in (self._listener, *self._found.values()):
            one.close()

    def _address(self, rank: int) -> bytes:
        return f"\0procgroup-start-{self._job}-{rank}".encode()

    def _look(self) -> None:
        for other in self._others:
            if other in self._found:
                continue
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                connection.connect(self._address(other))
            except OSError:
                connection.close()
            else:
                self._found[other] = connection


def _has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
