"""Which addresses of a host another host reaches: a TCP connection to each of them, all at the same time.

Every host listens at a free port of all its addresses, and sends a token to whoever connects. The token shows that the
connection has reached that host: the address of a container network, such as 172.17.0.1, is often one of every host,
and leads to the host itself. The listener reads nothing, and the token is of no other use.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Self

from procgroup.stores.addresses import listen

REACHED = "reached"
SILENT = "no answer"
REFUSED = "refused"
ANOTHER_HOST = "another host has this address"

_TOKEN_BYTES = 16


class Target(NamedTuple):
    """One address of another host, and the port and token of that host's listener."""

    address: str
    port: int
    token: str


class Listener:
    """Sends a token to whoever connects, until it is closed."""

    def __init__(self) -> None:
        self.token: str = secrets.token_hex(_TOKEN_BYTES)
        self._server = listen("", 0)  # at all addresses
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="procgroup-doctor-listener", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                if error.errno in (errno.ECONNABORTED, errno.EMFILE):
                    continue
                return  # closed
            with connection, suppress(OSError):
                connection.sendall(self.token.encode())

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends accept() in the thread
        self._server.close()
        self._thread.join(timeout=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def probe(targets: Sequence[Target], seconds: float) -> list[str]:
    """Connect to all targets at once, each for at most ``seconds``; return an outcome for each.

    That is ``REACHED``, ``SILENT``, ``REFUSED``, ``ANOTHER_HOST``, or the system's text, such as "No route to host".
    """
    return asyncio.run(_probe_all(targets, seconds))


async def _probe_all(targets: Sequence[Target], seconds: float) -> list[str]:
    return await asyncio.gather(*(_probe(target, seconds) for target in targets))


async def _probe(target: Target, seconds: float) -> str:
    try:
        async with asyncio.timeout(seconds):
            return await _read_token(target)
    except TimeoutError:
        return SILENT
    except ConnectionRefusedError:
        return REFUSED
    except asyncio.IncompleteReadError:
        return ANOTHER_HOST
    except OSError as error:
        return error.strerror or str(error)


async def _read_token(target: Target) -> str:
    reader, writer = await asyncio.open_connection(target.address, target.port)
    try:
        found = await reader.readexactly(len(target.token))
    finally:
        writer.close()
    return REACHED if found == target.token.encode() else ANOTHER_HOST
