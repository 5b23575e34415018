"""A store server that also answers clients of PyTorch's TCPStore, compared with PyTorch's own."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from stores.torch_store_programs import PROGRAMS

from procgroup.stores import TCPStore
from procgroup.stores.tcp import StoreServer
from world import run, start, wait_until

pytestmark = pytest.mark.torch

VALIDATION = struct.pack("<BI", 0, 0x3C85F7CE)
KEY = "ab" * 32
both_backends = pytest.mark.parametrize("use_libuv", [True, False], ids=["libuv", "legacy"])


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer("127.0.0.1", 0, job_key=KEY, answers_torch=True)
    yield made
    made.close()


def torch_client(port: int, *, seconds: float = 20, **options: Any) -> Any:
    import torch.distributed

    options = {"world_size": None, "is_master": False, **options}
    return torch.distributed.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=seconds), **options)


def our_client(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    monkeypatch.setenv("PROCGROUP_JOB_KEY", KEY)
    return TCPStore("127.0.0.1", server.port, timeout=20)


def raw(server: StoreServer, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(VALIDATION + sent)
    return connection


def reply(connection: socket.socket, size: int) -> bytes:
    with connection.makefile("rb") as stream:
        return stream.read(size)


def sized(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def next_request(server: StoreServer, pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Start a call in a thread, and return once its first request has reached the server."""
    before = server.requests
    future = pool.submit(call, *args)
    wait_until(lambda: server.requests > before)
    return future


# --- the same answers ---


@both_backends
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.__name__))
def test_every_operation_answers_as_torchs_own_server(
    server: StoreServer, program: Callable[[Any, Any], list[Any]], use_libuv: bool
) -> None:
    theirs = torch_client(0, is_master=True, use_libuv=use_libuv)
    clients = [torch_client(server.port, use_libuv=use_libuv) for _ in range(2)]
    assert program(*clients) == program(theirs, theirs.clone())


@both_backends
def test_clients_count_themselves_with_wait_for_workers(server: StoreServer, use_libuv: bool) -> None:
    for count in (1, 2):
        store = torch_client(server.port, world_size=2, wait_for_workers=True, use_libuv=use_libuv)
        assert (store.num_keys(), store.list_keys()) == (1, [])
        with raw(server, b"\x03" + sized(b"init/")) as connection:
            assert reply(connection, 9) == sized(str(count).encode())


# --- waiting ---


@both_backends
def test_get_waits_until_another_client_sets_the_key(server: StoreServer, use_libuv: bool) -> None:
    store, other = (torch_client(server.port, use_libuv=use_libuv) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        for number, operation in enumerate((other.set, other.append, lambda key, value: other.add(key, int(value)))):
            waiting = next_request(server, pool, store.get, f"key {number}")
            operation(f"key {number}", "7")
            assert waiting.result(20) == b"7"


@both_backends
def test_a_wait_for_several_keys_ends_with_the_last(server: StoreServer, use_libuv: bool) -> None:
    store, other = (torch_client(server.port, use_libuv=use_libuv) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = next_request(server, pool, store.multi_get, ["a", "b", "c", "b"])
        other.multi_set(["c", "b"], ["3", "2"])
        other.check([])  # has an answer, so the keys are set by now
        assert not waiting.done()
        other.set("a", "1")
        assert waiting.result(20) == [b"1", b"2", b"3", b"2"]


@both_backends
def test_a_wait_that_timed_out_leaves_the_connection_usable(server: StoreServer, use_libuv: bool) -> None:
    store, other = (torch_client(server.port, use_libuv=use_libuv) for _ in range(2))
    for number in range(3):
        with pytest.raises(RuntimeError, match="wait timeout after 20ms"):
            store.wait([f"key {number}"], timedelta(milliseconds=20))
        other.set(f"key {number}", str(number))
        assert store.get(f"key {number}") == str(number).encode()


def test_queued_values_reach_waiting_clients_in_order(server: StoreServer) -> None:
    stores = [torch_client(server.port) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        waiting = [next_request(server, pool, store.queue_pop, "q") for store in stores]
        for number, pop in enumerate(waiting):
            torch_client(server.port).queue_push("q", str(number))
            assert pop.result(20) == str(number).encode()


@both_backends
def test_8_clients_at_once(server: StoreServer, use_libuv: bool) -> None:
    def work(rank: int) -> bytes:
        store = torch_client(server.port, use_libuv=use_libuv)
        for turn in range(30):
            store.add("total", 1)
            store.set(f"{turn} of {rank}", "x" * 1000 * turn)
            store.wait([f"{turn} of {other}" for other in range(8)])
            assert len(store.get(f"{turn} of {(rank + 1) % 8}")) == 1000 * turn
        store.barrier("end", 8, timedelta(seconds=30))
        return bytes(store.get("total"))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [b"240"] * 8


def wait_for_ever(rank: int, size: int, port: int, operation: str) -> None:
    getattr(torch_client(port, seconds=600), operation)("key")


@pytest.mark.parametrize("operation", ["get", "queue_pop"])
def test_a_client_killed_while_it_waits_consumes_no_value(server: StoreServer, operation: str) -> None:
    with start(wait_for_ever, 1, args=(server.port, operation), torch=True) as world, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: server.requests == 2)  # its ping, and its wait
        assert server.list_clients() == ["a client of PyTorch's TCPStore at 127.0.0.1"]
        store, other = torch_client(server.port), torch_client(server.port)
        waiting = next_request(server, pool, getattr(store, operation), "key")
        world.kill(0, signal.SIGKILL)
        wait_until(lambda: server.clients == 2)
        (other.queue_push if operation == "queue_pop" else other.set)("key", "value")
        assert waiting.result(20) == b"value"


def test_a_client_of_pytorch_is_not_counted_as_one_of_procgroup(server: StoreServer) -> None:
    client = torch_client(server.port)
    client.set("key", "value")
    assert server.list_clients() == ["a client of PyTorch's TCPStore at 127.0.0.1"]
    assert (server.clients, server.procgroup_clients) == (1, 0)


def test_ctrl_c_ends_a_client_whose_store_forgets(server: StoreServer) -> None:
    # torch's client does not look for signals while it waits.
    with start(wait_for_ever, 1, args=(server.port, "get"), torch=True) as world:
        wait_until(lambda: server.requests == 2)
        world.kill(0, signal.SIGINT)
        server.forget_torch()
        (outcome,) = world.wait(20)
        assert "KeyboardInterrupt" in f"{outcome.error!r} {outcome.output}"


# --- apart from procgroup's keys ---


def test_neither_kind_of_client_sees_the_keys_of_the_other(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = our_client(server, monkeypatch), torch_client(server.port)
    ours.multi_set(["key", "/key"], ["ours", "ours"])
    assert not theirs.check(["key"])
    theirs.set("key", "theirs")
    theirs.queue_push("jobs", "theirs")
    assert theirs.delete_key("key") and not ours.check(["jobs"])
    assert ours.multi_get(["key", "/key"]) == [b"ours", b"ours"]
    assert (ours.num_keys(), theirs.num_keys()) == (2, 0)


def test_forgetting_clears_torchs_keys_and_no_others(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = our_client(server, monkeypatch), torch_client(server.port)
    ours.set("key", "kept")
    theirs.set("key", "forgotten")
    theirs.queue_push("jobs", "forgotten")
    with ThreadPoolExecutor(1) as pool:
        waiting = next_request(server, pool, theirs.get, "never")
        server.forget_torch()
        with pytest.raises(RuntimeError, match="Connection was likely closed"):
            waiting.result(20)
    assert server.clients == 1
    later = torch_client(server.port)
    assert (later.num_keys(), later.queue_len("jobs"), ours.get("key")) == (0, 0, b"kept")
    server.close()
    server.forget_torch()


def test_the_server_stays_until_torchs_clients_have_left(server: StoreServer) -> None:
    store = torch_client(server.port)
    store.set("key", "value")
    server.release()
    assert store.get("key") == b"value" and server.running
    del store
    wait_until(lambda: not server.running)


def test_torch_clients_are_refused_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    server = StoreServer("127.0.0.1", 0)
    with raw(server) as connection:
        assert connection.recv(1) == b""
    assert "it is a client of PyTorch's TCPStore, and this store answers clients of procgroup only" in (
        text := capfd.readouterr().err
    )
    assert text.count("\n") == 1
    with pytest.raises(RuntimeError, match="Connection was likely closed"):
        torch_client(server.port, seconds=0.1)
    server.forget_torch()
    server.close()


# --- hostile ---


HOSTILE = {
    "an unknown operation": b"\x13",
    "another validation": VALIDATION,
    "another protocol": b"PGSTORE1\r\n\r\n",
    "a key that is too long": b"\x03" + struct.pack("<Q", 70_000),
    "a value that is too long": b"\x01" + sized(b"key") + struct.pack("<Q", 2**30 + 1),
    "a length of 64 bits": b"\x01" + struct.pack("<Q", 2**64 - 1),
    "too many keys": b"\x06" + struct.pack("<Q", 70_000),
    "a second wait": (b"\x06" + struct.pack("<Q", 1) + sized(b"missing")) * 2,
    "a wait in a barrier": b"\x12" + sized(b"b") + struct.pack("<q", 2) + b"\x06" + struct.pack("<Q", 1) + sized(b"m"),
    "a sum of more than 64 bits": (b"\x04" + sized(b"n") + struct.pack("<q", 2**63 - 1)) * 2,
    "a reply that is too long": b"\x0a" + struct.pack("<Q", 60_000) + sized(b"large") * 60_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_malformed_request_closes_its_connection_only(
    server: StoreServer, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with raw(server, b"\x01" + sized(b"large") + sized(b"x" * 20_000) + b"\x0dpid.") as good:
        assert reply(good, 4) == b"pid."
        bad = raw(server, HOSTILE[name])
        with bad, contextlib.suppress(ConnectionResetError):
            while bad.recv(1000):
                pass
        good.sendall(b"\x0dpid.")
        assert reply(good, 4) == b"pid."
    text = capfd.readouterr().err
    assert (
        text.count("\n") == 1
        and f"procgroup WARNING: the store on port {server.port}: closed the connection from" in text
    )


def test_a_client_that_does_not_read_is_not_read_from(server: StoreServer) -> None:
    value = b"x" * 4_000_000
    store = torch_client(server.port)
    store.set("key", value)
    assert store.check(["key"])
    before = server.requests
    with raw(server, (b"\x03" + sized(b"/key")) * 50) as lazy:
        wait_until(lambda: server.requests > before)
        assert store.get("key") == value
        assert server.requests < before + 50
        assert reply(lazy, 50 * (8 + len(value))) == sized(value) * 50


# --- PyTorch programs ---


def all_reduce(rank: int, size: int) -> tuple[float, str]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    dist.barrier()
    backend = dist.get_backend()
    dist.destroy_process_group()
    return tensor.mean().item(), backend


def test_stock_process_groups_start_at_the_agents_store_in_two_attempts(server: StoreServer) -> None:
    for attempt in range(2):
        agent = {
            "MASTER_PORT": str(server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        assert run(all_reduce, 4, environment=agent, torch=True) == [(10.0, "gloo")] * 4
        assert torch_client(server.port).num_keys() > 0
        server.forget_torch()
        assert torch_client(server.port).num_keys() == 0
