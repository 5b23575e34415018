"""What is TCPStore's own: the server, its limits, foreign and hostile clients, keys, ends of processes."""

from __future__ import annotations

import hashlib
import hmac
import multiprocessing
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from procgroup import _native
from procgroup.errors import DistNetworkError, DistStoreError, StoreLost, StoreTimeout
from procgroup.stores import TCPStore, tcp
from procgroup.stores.tcp import StoreServer
from waiting import stop
from world import free_port, run_command, without_reports


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer("127.0.0.1", 0)
    yield made
    made.close()


def client_of(server: StoreServer, timeout: float = 10) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, timeout=timeout)


def raw(server: StoreServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def hello(flags: int = 0) -> bytes:
    return b"PGSTORE1\r\n\r\n" + struct.pack("<II", 3, flags) + bytes(8) + bytes(32) + bytes(64) + bytes(4)


def opened(server: StoreServer) -> socket.socket:
    connection = raw(server)
    connection.sendall(hello())
    assert len(connection.recv(148, socket.MSG_WAITALL)) == 148
    return connection


def is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    connection.close()
    return True


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 1000])
def test_hmac_sha256_is_the_standard_one(size: int) -> None:
    key, message = secrets.token_bytes(size), secrets.token_bytes(2 * size + 1)
    assert _native.hmac_sha256(key, message) == hmac.new(key, message, hashlib.sha256).digest()


# --- addresses ---


def listening_addresses(port: int) -> set[str]:
    import psutil

    return {
        c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port
    }


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")])
def test_a_local_address_is_bound_alone(host: str, address: str) -> None:
    with TCPStore(host, 0, is_master=True, wait_for_workers=False) as store:
        assert listening_addresses(store.port) == {address}
        assert store.host == host
        assert store.libuvBackend is True


def test_another_name_binds_every_address_and_says_that_it_has_no_key(caplog: pytest.LogCaptureFixture) -> None:
    with TCPStore("no-such-host.invalid", 0, is_master=True, wait_for_workers=False) as store:
        assert listening_addresses(store.port) <= {"::", "0.0.0.0"}
        store.set("key", "x")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("procgroup", "WARNING")
    assert "without a job key" in record.getMessage()


def test_a_port_in_use_is_named_with_what_to_do(server: StoreServer) -> None:
    with pytest.raises(DistNetworkError, match=f"port: {server.port}, code: -98, name: EADDRINUSE.*choose another"):
        TCPStore("127.0.0.1", server.port, is_master=True, wait_for_workers=False)


def test_multi_tenant_joins_the_store_that_has_the_port(server: StoreServer) -> None:
    client_of(server).set("key", "x")
    with TCPStore("127.0.0.1", server.port, is_master=True, multi_tenant=True, wait_for_workers=False) as store:
        assert store.get("key") == b"x"


def test_a_listening_socket_is_taken_over() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with TCPStore(
        "127.0.0.1", port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False
    ) as store:
        assert store.port == port
        assert TCPStore("127.0.0.1", port).add("n", 1) == 1


def test_a_socket_that_does_not_listen_is_refused() -> None:
    with socket.socket() as idle, pytest.raises(ValueError, match="listens"):
        StoreServer("127.0.0.1", 0, listen_fd=idle.fileno())


@pytest.mark.parametrize(
    ("port", "error"), [("29500", TypeError), (None, TypeError), (-1, ValueError), (70000, ValueError)]
)
def test_a_bad_port_is_refused(port: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="port"):
        TCPStore("127.0.0.1", port, is_master=True)  # type: ignore[arg-type]
    with pytest.raises(error, match="port"):
        TCPStore("127.0.0.1", port, timeout=1)  # type: ignore[arg-type]


# --- joining ---


def test_nobody_there_ends_at_the_timeout() -> None:
    port = free_port()
    started = time.monotonic()
    text = rf"The client socket has timed out after 1000ms while trying to connect to \(127.0.0.1, {port}\)\."
    with pytest.raises(DistNetworkError, match=text):
        TCPStore("127.0.0.1", port, timeout=1)
    assert 1 <= time.monotonic() - started < 10


def test_a_client_tells_the_timeout_it_was_given_however_long_the_name_took(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve_slowly(host: str, seconds: float) -> list[str]:
        time.sleep(0.3)
        return ["127.0.0.1"]

    monkeypatch.setattr(tcp, "resolve_until", resolve_slowly)
    started = time.monotonic()
    with pytest.raises(DistNetworkError, match="timed out after 800ms while trying to connect to"):
        TCPStore("slow.example", free_port(), timeout=0.8)
    assert 0.8 <= time.monotonic() - started < 8


def test_a_client_may_come_before_the_server() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(lambda: TCPStore("127.0.0.1", port, timeout=10).add("n", 1))
        time.sleep(0.1)  # most often the client has found nobody by then
        late = StoreServer("127.0.0.1", port)
        assert early.result() == 1
        late.close()


def test_the_master_waits_for_its_workers() -> None:
    started = time.monotonic()
    with pytest.raises(DistStoreError, match=r"^Timed out after 2 seconds waiting for clients. 1/2 clients joined.$"):
        TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=2)
    assert time.monotonic() - started < 20
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(TCPStore, "127.0.0.1", port, 2)
        master = TCPStore("127.0.0.1", port, 2, is_master=True, timeout=10, master_listen_fd=listener.detach())
        worker.result().set("key", "x")
    assert master.get("key") == b"x"
    master.close()


def test_1000_clients_connect_and_pass_a_barrier(server: StoreServer) -> None:
    clients = []
    count = 1000
    connections = [opened(server) for _ in range(count)]
    for number, connection in enumerate(connections):
        body = struct.pack("<I", 1) + b"b" + struct.pack("<Q", count)
        connection.sendall(struct.pack("<IB3xI", len(body), 16, number) + body)
    for number, connection in enumerate(connections):
        assert connection.recv(12, socket.MSG_WAITALL) == struct.pack("<IB3xI", 0, 0, number)
        clients.append(connection)
    assert server.requests == count
    for connection in clients:
        connection.close()


# --- foreign and hostile ---


HOSTILE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 100,
    "a frame that is too long": hello() + struct.pack("<IB3xI", 0xFFFFFFFF, 1, 1),
    "an unknown operation": hello() + struct.pack("<IB3xI", 0, 99, 1),
    "a field beyond its frame": hello() + struct.pack("<IB3xI", 4, 2, 1) + struct.pack("<I", 100),
    "bytes too many": hello() + struct.pack("<IB3xI", 5, 8, 1) + b"12345",
    "a key that is too long": hello() + struct.pack("<IB3xI", 70004, 2, 1) + struct.pack("<I", 70000) + b"k" * 70000,
    "a request number in use": hello() + (struct.pack("<IB3xI", 5, 2, 7) + struct.pack("<I", 1) + b"k") * 2,
    "too many waits": hello()
    + b"".join(struct.pack("<IB3xI", 5, 2, i) + struct.pack("<I", 1) + b"k" for i in range(100)),
    "another version": b"PGSTORE1\r\n\r\n" + struct.pack("<I", 9) + bytes(112),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_the_protocol_closes_that_connection_alone(
    server: StoreServer, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    store = client_of(server)
    store.set("key", "kept")
    with raw(server) as connection:
        connection.sendall(HOSTILE[name])
        assert is_closed(connection)
    assert store.get("key") == b"kept"
    text = capfd.readouterr().err
    assert text.count("\n") == 1
    assert f"procgroup WARNING: the store on port {server.port}: closed the connection from 127.0.0.1:" in text


def test_a_client_that_vanishes_leaves_its_barrier(server: StoreServer) -> None:
    gone = opened(server)
    body = struct.pack("<I", 1) + b"b" + struct.pack("<Q", 2)
    gone.sendall(struct.pack("<IB3xI", len(body), 16, 1) + body)
    while server.requests == 0:
        time.sleep(0.001)
    gone.close()
    while server.clients:
        time.sleep(0.001)
    with pytest.raises(DistStoreError, match="barrier timeout"):
        client_of(server).barrier("b", 2, 0.1)


def test_a_client_that_does_not_read_holds_up_nobody(server: StoreServer) -> None:
    store = client_of(server)
    store.set("big", b"x" * 4_000_000)
    lazy = opened(server)
    request = struct.pack("<IB3xI", 7, 2, 1) + struct.pack("<I", 3) + b"big"
    lazy.settimeout(1)
    for _ in range(50):
        lazy.sendall(request)
    assert store.get("big", 5) == b"x" * 4_000_000
    lazy.close()


def test_a_foreign_server_is_named_long_before_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        started = time.monotonic()
        with pytest.raises(DistNetworkError, match="is not a procgroup store: its first bytes are 'HTTP/1.1 400'"):
            TCPStore("127.0.0.1", listener.getsockname()[1], timeout=20)
        assert time.monotonic() - started < 5
        thread.join()


@pytest.mark.parametrize(
    ("method", "status", "body", "text"),
    [
        ("num_keys", 0, b"123", "ends inside a field"),
        ("list_keys", 0, struct.pack("<I", 9) + b"short", "ends inside a field"),
        ("list_keys", 3, b"no \xff", "no \ufffd"),
        ("num_keys", 4, b"", "ends inside a field"),
    ],
)
def test_a_reply_that_makes_no_sense_is_an_error_of_the_store(method: str, status: int, body: bytes, text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(128, socket.MSG_WAITALL)
                connection.sendall(b"PGSTORE1\r\n\r\n" + struct.pack("<II", 3, 0) + bytes(128))
                length, _, number = struct.unpack("<IB3xI", connection.recv(12, socket.MSG_WAITALL))
                connection.recv(length, socket.MSG_WAITALL)
                connection.sendall(struct.pack("<IB3xI", len(body), status, number) + body)
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        store = TCPStore("127.0.0.1", listener.getsockname()[1], timeout=5)
        with pytest.raises(DistStoreError, match=text):
            getattr(store, method)()
        store.close()
        thread.join()


def test_a_silent_server_is_told_of_before_the_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(DistNetworkError, match="accepts connections and says nothing"):
            TCPStore("127.0.0.1", listener.getsockname()[1], timeout=4)
        assert "is it a procgroup store?" in capfd.readouterr().err


def test_one_more_connection_to_a_server_that_has_ended_is_not_attempted_until_the_timeout() -> None:
    server = StoreServer("127.0.0.1", 0)
    store = client_of(server)
    server.close()
    began = time.monotonic()
    with pytest.raises(StoreLost):
        store.with_timeout(60).set_on_disconnect("gone", "")
    assert time.monotonic() - began < 20
    store.close()


# --- jobs and keys ---


def test_another_job_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    server = StoreServer("127.0.0.1", 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    with pytest.raises(DistNetworkError, match="belongs to another job, 'first'; this process is in job 'second'"):
        client_of(server)
    server.close()


@pytest.mark.parametrize(
    ("theirs", "mine", "text"),
    [
        ("aa" * 32, "bb" * 32, "another key"),
        ("aa" * 32, "", "this process has none"),
        ("", "bb" * 32, "does not prove this job's key"),
    ],
)
def test_both_sides_prove_the_key(monkeypatch: pytest.MonkeyPatch, theirs: str, mine: str, text: str) -> None:
    with_key = StoreServer("127.0.0.1", 0, job_key=theirs)
    monkeypatch.setenv("PROCGROUP_JOB_KEY", mine)
    with pytest.raises(DistNetworkError, match=text):
        client_of(with_key)
    monkeypatch.setenv("PROCGROUP_JOB_KEY", theirs)
    assert client_of(with_key).add("n", 1) == 1
    with_key.close()


def test_a_wrong_proof_is_refused_by_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    server = StoreServer("127.0.0.1", 0, job_key="aa" * 32)
    with raw(server) as connection:
        connection.sendall(hello(1))
        connection.recv(148, socket.MSG_WAITALL)
        connection.sendall(bytes(32))
        assert connection.recv(4, socket.MSG_WAITALL) != bytes(4)
        assert is_closed(connection)
    assert "its job key is a different one" in capfd.readouterr().err
    server.close()


def test_a_key_that_is_not_hex_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCGROUP_JOB_KEY", "secret")
    with pytest.raises(ValueError, match="PROCGROUP_JOB_KEY"):
        StoreServer("127.0.0.1", 0)


# --- ends ---


def test_a_lost_server_ends_every_call(server: StoreServer) -> None:
    store = client_of(server)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(store.get, "nope") for _ in range(2)]
        while server.requests < 2:
            time.sleep(0.001)
        server.close()
        for each in waiting:
            with pytest.raises(StoreLost, match=f"127.0.0.1:{server.port}"):
                each.result(20)
    with pytest.raises(StoreLost):
        store.set("key", "x")


def test_get_is_one_request(server: StoreServer) -> None:
    store = client_of(server)
    store.set("key", "x")
    before = server.requests
    store.get("key")
    assert server.requests == before + 1


def run_python(text: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


HOST = """
import sys, time
from procgroup.stores import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
store.get("joined")
"""


@pytest.mark.parametrize("drop", ["", "del store\n"])
def test_the_hosting_process_lingers_at_a_normal_exit(drop: str) -> None:
    host = run_python(HOST + drop)
    assert host.stdout is not None
    store = TCPStore("127.0.0.1", int(host.stdout.readline()), timeout=10)
    store.set("joined", "")
    with pytest.raises(subprocess.TimeoutExpired):
        host.wait(0.5)
    store.set("still", "there")
    store.close()
    out, err = host.communicate(timeout=10)
    assert (host.returncode, out, without_reports(err)) == (0, "", ""), err


OWN_CLIENTS = {
    "a client that waits in a thread": "threading.Thread(target=lambda: client.get('never', 60), daemon=True).start()",
    "a client that is to be noticed": "kept = client.set_on_disconnect('gone', '')",
    "a copy of a client": "kept = client.clone(); kept.set('key', 'value')",
}


@pytest.mark.parametrize("use", OWN_CLIENTS.values(), ids=OWN_CLIENTS)
def test_a_process_that_hosts_a_store_does_not_wait_for_its_own_clients(use: str) -> None:
    # The functions of atexit alone: after them Python ends a thread that waits in a native call.
    source = f"""
import atexit, os, threading
from procgroup import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", store.port)
{use}
atexit._run_exitfuncs()
os._exit(0)
"""
    began = time.monotonic()
    done = run_command([sys.executable, "-c", source])
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < tcp.LINGER_SECONDS - 5


def test_the_hosting_process_does_not_linger_after_an_exception() -> None:
    host = run_python(HOST + "raise SystemError('boom')")
    assert host.stdout is not None
    store = TCPStore("127.0.0.1", int(host.stdout.readline()), timeout=10)
    store.set("joined", "")
    _, err = host.communicate(timeout=120)
    assert host.returncode == 1
    assert err.strip().endswith("SystemError: boom")
    with pytest.raises(StoreLost):
        store.get("joined")


def test_a_server_that_is_stopped_is_late_and_no_foreign_program() -> None:
    host = run_python(HOST)
    assert host.stdout is not None
    store = TCPStore("127.0.0.1", int(host.stdout.readline()), timeout=10)
    store.set("key", "value")
    stop(host.pid)
    for _ in range(3):  # the first connection is given up; the others connect anew
        with pytest.raises(StoreTimeout):
            store.get("key", 0.1)
    host.send_signal(signal.SIGCONT)
    assert store.get("key") == b"value"
    store.set("joined", "")
    store.close()
    assert host.communicate(timeout=120) == ("", "")


def test_a_forked_child_keeps_no_connection_of_its_parent(server: StoreServer) -> None:
    store = client_of(server)
    store.set("key", "x")
    assert server.clients == 1
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    store.close()
    while server.clients:
        time.sleep(0.001)
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)


def test_the_port_is_free_after_close() -> None:
    for _ in range(3):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        store.close()
        again = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        again.close()


@pytest.mark.parametrize(
    ("use", "loads_native"), [("EtcdStore, PrefixStore, Store", False), ("HashStore; HashStore().set('a', 'b')", True)]
)
def test_a_store_loads_the_native_module_only_when_it_needs_it_and_never_numpy(use: str, loads_native: bool) -> None:
    check = (
        f"import sys; from procgroup.stores import {use}\n"
        f"assert ('procgroup._native' in sys.modules) is {loads_native} and 'numpy' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=120).returncode == 0


# --- the end of a connection ---


def register_and_wait(port: int, key: str, ready: Any) -> None:
    """In a process of its own: let the store set a key when this process ends."""
    store = TCPStore("127.0.0.1", port, timeout=10)
    registered = store.set_on_disconnect(key, "ended")
    assert registered is not None
    if os.fork() == 0:  # a child that lives on does not hide the end
        ready.send(os.getpid())
        time.sleep(60)
    time.sleep(60)


def test_a_key_is_set_when_the_process_is_killed_also_where_a_forked_child_lives_on(server: StoreServer) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=register_and_wait, args=(server.port, "key", theirs))
    process.start()
    child = ours.recv()
    store = client_of(server)
    assert store.check(["key"]) is False
    process.kill()
    started = time.monotonic()
    assert store.get_unless(["missing"], "key", 10) == b"ended"
    assert time.monotonic() - started < 5
    os.kill(child, signal.SIGKILL)
    process.join()
    store.close()


def test_a_key_that_was_withdrawn_or_is_there_is_not_set(server: StoreServer) -> None:
    store, other = client_of(server), client_of(server)
    withdrawn, late, closed = (other.set_on_disconnect(key, "ended") for key in ("withdrawn", "late", "closed"))
    store.set("late", "first")
    withdrawn.withdraw()
    late.close()
    closed.close()
    assert store.get("closed", 5) == b"ended"
    assert store.get("late") == b"first"
    assert store.check(["withdrawn"]) is False


def test_requests_that_time_out_do_not_pass_for_the_end_of_the_process(server: StoreServer) -> None:
    store = client_of(server)
    registered = store.set_on_disconnect("key", "ended")
    for _ in range(3):
        with pytest.raises(StoreTimeout):
            store.get("missing", 0.01)
    store.close()
    other = client_of(server)
    assert other.check(["key"]) is False
    registered.withdraw()
    assert other.check(["key"]) is False


@pytest.mark.parametrize("job_key", ["", "5e"])
def test_a_client_that_has_connected_is_counted(job_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCGROUP_JOB_KEY", job_key)
    server = StoreServer("127.0.0.1", 0)
    enough = time.monotonic() + 10
    for _ in range(2000):
        if time.monotonic() > enough:
            break
        store = TCPStore("127.0.0.1", server.port, timeout=10)
        assert server.clients == 1
        store.close()
        while server.clients:
            time.sleep(0)
    server.close()


def test_a_server_names_its_clients(server: StoreServer) -> None:
    store = client_of(server)
    assert server.list_clients() == [f"process {os.getpid()} at 127.0.0.1"]
    server.name_users({os.getpid(): "rank 3 (here)"})
    assert server.list_clients() == ["rank 3 (here)"]
    store.close()


def test_a_large_value_for_a_server_that_is_stopped_times_out() -> None:
    serve = """
from procgroup.stores.tcp import StoreServer
server = StoreServer("127.0.0.1", 0)
print(server.port, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        store = TCPStore("127.0.0.1", int(server.stdout.readline()), wait_for_workers=False)
        store.set("key", "small")
        server.send_signal(signal.SIGSTOP)
        try:
            store.set_timeout(0.5)
            with pytest.raises(StoreTimeout):
                store.set("key", bytes(64 << 20))  # more than the buffers of a connection hold
        finally:
            server.kill()
