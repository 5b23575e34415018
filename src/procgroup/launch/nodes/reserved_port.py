"""A port that is kept free for the ranks: MASTER_PORT, where rank 0 of a PyTorch program hosts torch's store.

The socket is bound and never listens. So the kernel does not assign the port to a process that asks for any free one,
but a program that names the port can bind it with SO_REUSEADDR, as torch's stores, ours and socket.create_server do.
"""

from __future__ import annotations

import socket


class ReservedPort:
    """A bound TCP port of an address or host name; 0 means any free port. Raises OSError when the port is taken."""

    def __init__(self, host: str, port: int) -> None:
        name = host.encode() if host.isascii() else host  # the codec for other names takes two milliseconds to load
        family, kind, protocol, _, address = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
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
        """Return another holder of the same port; the port is released when all holders are closed."""
        other = ReservedPort.__new__(ReservedPort)
        other._socket, other.port = self._socket.dup(), self.port
        return other

    def close(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()
