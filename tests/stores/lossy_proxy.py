"""A proxy that loses one request, or the answer to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress


@contextmanager
def lossy_proxy(port: int, trigger: bytes, *, forwards: bool) -> Iterator[int]:
    """Pass connections on to a port of this host; yield the port to connect to.

    A connection ends with a request that contains ``trigger``: before the server gets the request, or, where the proxy
    ``forwards`` it, instead of the answer.
    """

    def serve(client: socket.socket) -> None:
        is_lost = threading.Event()
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            back = pool.submit(pass_back, client, server, is_lost)
            with suppress(OSError):
                while data := client.recv(1 << 20):
                    if trigger in data:
                        is_lost.set()
                        if not forwards:
                            break
                    server.sendall(data)
            _end(server, client)
            back.result()

    def pass_back(client: socket.socket, server: socket.socket, is_lost: threading.Event) -> None:
        with suppress(OSError):
            while (data := server.recv(1 << 20)) and not is_lost.is_set():
                client.sendall(data)
        _end(server, client)

    def accept() -> None:
        with suppress(OSError):
            while True:
                pool.submit(serve, listener.accept()[0])

    with ThreadPoolExecutor(32) as pool, socket.create_server(("127.0.0.1", 0)) as listener:
        pool.submit(accept)
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _end(*connections: socket.socket) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
