"""A host with several addresses, of which one swallows what is sent to it."""

from __future__ import annotations

import socket
import threading
import time

import pytest

import procgroup as dist
from procgroup import _native
from procgroup.stores.tcp import StoreServer
from world import free_port


def test_a_store_that_does_not_answer_is_told_once_however_often_a_process_tries(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for _ in range(3):
            with pytest.raises(dist.DistNetworkError):
                dist.TCPStore("127.0.0.1", port, timeout=1.2)
    assert capfd.readouterr().err.count(f"port {port} of 127.0.0.1 accepts connections but has not answered") == 1


def _fill(listener: socket.socket) -> list[socket.socket]:
    """Fill a listener's queue, so that it answers no further connection; return what fills it."""
    clients = []
    for _ in range(8):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(listener.getsockname())
        clients.append(client)
    return clients


def test_a_silent_address_does_not_keep_a_client_from_trying_the_other_one_again() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.2", port), backlog=0) as silent:
        clients = _fill(silent)
        servers: list[StoreServer] = []
        starter = threading.Timer(0.5, lambda: servers.append(StoreServer("127.0.0.1", port, job_key="")))
        starter.start()
        began = time.monotonic()
        client = _native.StoreClient(["127.0.0.2", "127.0.0.1"], "twofold", port, "", b"", 0, 20.0)
        client.set("key", "value", 5.0)
        assert time.monotonic() - began < 10
        client.close()
        starter.join()
        servers[0].close()
        for other in clients:
            other.close()
