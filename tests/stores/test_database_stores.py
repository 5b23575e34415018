"""What etcd's and Redis's stores have in common beyond the contract: jobs, ends of keys and of servers."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from stores.lossy_proxy import lossy_proxy
from stores.store_kinds import ADDRESSES, param

import world
from database_servers import etcd_server, redis_server
from documentation.page_programs import ROOT, blocks
from procgroup.errors import DistError, DistNetworkError, DistStoreError, StoreLimitError, StoreLost, StoreTimeout
from procgroup.stores import EtcdStore, RedisStore

pytestmark = [pytest.mark.usefixtures("database_servers")]

CLASSES = {"etcd": EtcdStore, "redis": RedisStore}
_URLS = {"etcd": "http://127.0.0.1:{}", "redis": "redis://127.0.0.1:{}"}
_SERVERS = {"etcd": etcd_server, "redis": redis_server}

AnyStore = EtcdStore | RedisStore


@pytest.fixture(params=[param(kind) for kind in CLASSES])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., AnyStore]]:
    """Make stores on the session's server, for jobs of this test; remove their keys and close them at the end."""
    made: list[tuple[str, AnyStore]] = []

    def make(job: str = "", **arguments: object) -> AnyStore:
        name = f"{os.getpid()}-{request.node.name}{job}"
        store = CLASSES[kind](ADDRESSES[kind], name, **arguments)  # type: ignore[arg-type]
        made.append((name, store))
        return store

    yield make
    for name, store in made:
        store.close()
        with CLASSES[kind](ADDRESSES[kind], name) as left:
            left.delete_all()


@contextmanager
def own_server(kind: str, folder: Path, port: int | None = None) -> Iterator[tuple[subprocess.Popen[bytes], str, int]]:
    """Start a server for one test; yield its process, its URL and its port."""
    port = port or world.free_port()
    with _SERVERS[kind](folder, port) as server:
        yield server, _URLS[kind].format(port), port


# --- jobs ---


def test_jobs_with_other_prefixes_do_not_meet(make: Callable[..., AnyStore]) -> None:
    jobs = [make(name) for name in ("", "/a", "/a/b", "%2Fa", "*")]
    for number, job in enumerate(jobs):
        job.set("key", str(number))
        job.queue_push("queue", str(number))
    assert [job.get("key") for job in jobs] == [b"0", b"1", b"2", b"3", b"4"]
    assert all(sorted(job.list_keys()) == ["key", "queue"] for job in jobs)


def test_stores_of_one_job_share_keys_and_waits(make: Callable[..., AnyStore]) -> None:
    first, second = make(), make()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.get, "key", 10)
        first.set("key", "value")
        assert waiting.result() == b"value"


def test_delete_all_removes_the_keys_of_one_job_only(make: Callable[..., AnyStore]) -> None:
    ours, theirs = make("ours"), make("theirs")
    for store in (ours, theirs):
        store.multi_set([str(number) for number in range(300)], ["value"] * 300)
        store.queue_push("queue", "item")
    ours.delete_all()
    assert ours.num_keys() == 0
    assert ours.queue_len("queue") == 0
    assert theirs.num_keys() == 301
    ours.set("key", "again")
    assert ours.get("key") == b"again"


def test_changes_keep_all_keys_of_a_job_which_vanish_some_time_after_the_last(make: Callable[..., AnyStore]) -> None:
    first = make(time_to_live=2)
    first.set("key", "value")
    first.queue_push("queue", "item")
    first.close()
    second = make(time_to_live=2)
    changes_end = time.monotonic() + 3
    while time.monotonic() < changes_end:
        second.add("number", 1)
        time.sleep(0.05)
    assert second.get("key", 0) == b"value"
    assert second.queue_len("queue") == 1
    deadline = time.monotonic() + 20
    while second.num_keys() > 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second.set("key", "again")
    assert second.get("key") == b"again"


def test_a_prefix_and_a_time_to_live_are_checked(kind: str) -> None:
    with pytest.raises(ValueError, match="expected a prefix for the keys"):
        CLASSES[kind](ADDRESSES[kind], "")
    with pytest.raises(ValueError, match="time to live of at least 1 s and at most .*, got 0.5 s"):
        CLASSES[kind](ADDRESSES[kind], "job", time_to_live=0.5)


# --- waits ---


def test_a_wait_needs_few_requests_and_leaves_few_connections(kind: str, make: Callable[..., AnyStore]) -> None:
    store = make()
    store.set("key", "value")
    served = _requests_served(kind)
    with pytest.raises(StoreTimeout):
        store.get("missing", 1)
    assert _requests_served(kind) - served < 12, "the wait asks again and again"
    with ThreadPoolExecutor(20) as pool:
        waits = [pool.submit(store.get, "late", 20) for _ in range(20)]
        store.set("late", "value")
        assert {wait.result() for wait in waits} == {b"value"}
    for _ in range(10):
        with pytest.raises(StoreTimeout):
            store.get("missing", 0)
    assert _connections(kind) <= 2 * 20, "one that is subscribed and one that reads, for each thread that waited"


def _requests_served(kind: str) -> int:
    if kind == "redis":
        import redis

        with redis.Redis.from_url(ADDRESSES[kind]) as client:
            return int(client.info("stats")["total_commands_processed"])
    with urllib.request.urlopen(f"http://{ADDRESSES[kind]}/metrics") as answer:
        counts = re.findall(r"^grpc_server_started_total.* (\d+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(int, counts))


def _connections(kind: str) -> int:
    port = int(ADDRESSES[kind].rpartition(":")[2])
    return sum(bool(each.raddr) and each.raddr.port == port for each in psutil.Process().net_connections("tcp"))


def test_a_close_ends_the_waits_of_other_threads(make: Callable[..., AnyStore]) -> None:
    store = make("closed")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "missing", 30)
        while not waiting.running():
            time.sleep(0.01)
        store.close()
        with pytest.raises(DistStoreError, match="closed"):
            waiting.result(10)


def test_a_value_above_the_limit_is_refused_and_nothing_is_stored(make: Callable[..., AnyStore]) -> None:
    store = make()
    too_large = bytes(store._max_value_bytes + 1)
    for change in (store.set, store.append, store.queue_push):
        with pytest.raises(StoreLimitError, match=f"a value of {len(too_large)} bytes"):
            change("key", too_large)
    with pytest.raises(StoreLimitError):
        store.multi_set(["a", "key"], ["small", too_large])
    assert store.num_keys() == 0


# --- servers that cannot be reached, and that end ---


def test_a_server_that_nobody_started_is_named_within_the_timeout(kind: str) -> None:
    port = world.free_port()
    began = time.monotonic()
    with pytest.raises(DistNetworkError, match=f"cannot connect to .*127.0.0.1:{port}: .*refused"):
        CLASSES[kind](_URLS[kind].format(port), "job", 1)
    assert time.monotonic() - began < 10


def test_a_silent_server_is_named_when_the_timeout_has_passed(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(DistNetworkError, match=f"127.0.0.1:{port}.*no answer"):
            CLASSES[kind](_URLS[kind].format(port), "job", 0.5)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_calls_raise_store_lost_within_ten_seconds_of_the_end_of_the_server(
    kind: str, how: signal.Signals, tmp_path: Path
) -> None:
    with own_server(kind, tmp_path) as (server, url, port), CLASSES[kind](url, "job") as store:
        store.set("key", "value")
        with ThreadPoolExecutor(4) as pool:
            calls: list[Callable[[], object]] = [
                lambda: store.get("missing"),
                lambda: store.queue_pop("missing"),
                lambda: store.barrier("barrier", 2),
            ]
            waits = [pool.submit(call) for call in calls]
            while store._read_barrier("barrier") is None:
                time.sleep(0.01)
            server.send_signal(how)
            began = time.monotonic()
            waits.append(pool.submit(store.add, "number", 1))
            for wait in waits:
                with pytest.raises(StoreLost, match=f"lost the store at 127.0.0.1:{port}") as caught:
                    wait.result(20)
                assert caught.value.port == port
            assert time.monotonic() - began < 14, "10 s, and what two busy cores may take"


def test_a_store_works_again_after_a_restart_of_the_server(kind: str, tmp_path: Path) -> None:
    with own_server(kind, tmp_path) as (_, url, port):
        store = CLASSES[kind](url, "job")
        store.set("key", "value")
    with own_server(kind, tmp_path, port):
        store.add("number", 1)
        assert store.get("number") == b"1"
        store.close()


def test_a_server_of_another_kind_is_refused(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(_answer_with_html, listener)
        with pytest.raises(DistError, match=f"127.0.0.1:{listener.getsockname()[1]}"):
            CLASSES[kind](_URLS[kind].format(listener.getsockname()[1]), "job", 5)
        listener.shutdown(socket.SHUT_RDWR)


def _answer_with_html(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            with client:
                client.recv(65536)
                client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\n<html>")


@pytest.mark.parametrize("forwards", [True, False], ids=["answer", "request"])
def test_a_change_whose_answer_is_lost_is_not_made_twice(kind: str, forwards: bool) -> None:
    job = f"{os.getpid()}-lossy-{forwards}"
    port = int(ADDRESSES[kind].rpartition(":")[2])
    trigger = {"etcd": b'"compare"', "redis": b"number"}[kind]
    with lossy_proxy(port, trigger, forwards=forwards) as proxy, CLASSES[kind](_URLS[kind].format(proxy), job) as store:
        store.set("key", "value")
        with pytest.raises(StoreLost, match=f"127.0.0.1:{proxy}"):
            store.add("number", 1)
    with CLASSES[kind](ADDRESSES[kind], job) as store:
        assert store.check(["number"]) is forwards
        store.delete_all()


# --- use by programs ---


def test_the_program_of_the_documentation_runs(kind: str) -> None:
    name = f"# {kind}_store.py\n"
    (program,) = [block.text for block in blocks(ROOT / "docs" / "stores.md") if block.text.startswith(name)]
    done = subprocess.run([sys.executable, "-c", program, ADDRESSES[kind]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


_PROGRAM = """
import sys
import numpy
import procgroup

store = procgroup.{store}({address!r}, {job!r}, timeout=40)
procgroup.init_process_group(store=store, rank=int(sys.argv[1]), world_size=2)
array = numpy.ones(3)
procgroup.all_reduce(array)
assert array.tolist() == [2, 2, 2]
procgroup.destroy_process_group()
store.close()
"""


def test_ranks_find_each_other_through_the_store(kind: str, make: Callable[..., AnyStore]) -> None:
    store = make()
    job = f"{os.getpid()}-ranks-{kind}"
    program = _PROGRAM.format(store=type(store).__name__, address=ADDRESSES[kind], job=job)
    ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank)]) for rank in range(2)]
    try:
        assert [rank.wait(45) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        with CLASSES[kind](ADDRESSES[kind], job) as left:
            left.delete_all()
