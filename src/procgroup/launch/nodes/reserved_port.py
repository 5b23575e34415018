"""A port that is kept for the ranks' own use: MASTER_PORT, where rank 0 of a PyTorch program hosts torch's store.

The socket is bound and never listens. So the system gives the port to nobody who asks for any free one, and a program
that names it can bind it, with SO_REUSEADDR, as servers do: torch's stores, ours, socket.create_server.
"""

from __future__ import annotations

import socket


class ReservedPort:
    """A bound TCP port of a literal address or host name; 0 takes a free one. Raises OSError when it is taken."""

    def __init__(self, host: str, port: int) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def share(self) -> ReservedPort:
        """Return another holder of the same port, which is given back with the last of them."""
        other = ReservedPort.__new__(ReservedPort)
        other._socket, other.port = self._socket.dup(), self.port
        return other

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self._socket.close()
