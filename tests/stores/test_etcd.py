"""What is EtcdStore's own: endpoints, fail-over, users, TLS, the limit on requests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from stores import certificates
from stores.lossy_proxy import lossy_proxy
from stores.store_kinds import ADDRESSES

import world
from database_servers import etcd_answers, etcd_member, etcd_server, lacks_etcd
from procgroup.errors import DistNetworkError, DistStoreError, StoreLimitError, StoreLost
from procgroup.stores import EtcdStore
from waiting import stop

pytestmark = [pytest.mark.skipif(bool(lacks_etcd()), reason=lacks_etcd())]


@pytest.mark.parametrize("endpoints", ["", [], "ftp://127.0.0.1:2379", ["http://one", "https://two"], "host,,other"])
def test_what_is_no_endpoint_is_refused(endpoints: str | list[str]) -> None:
    with pytest.raises(ValueError, match="expected endpoints such as 'host:2379'"):
        EtcdStore(endpoints, "job")


def test_files_for_tls_need_endpoints_for_tls() -> None:
    with pytest.raises(ValueError, match="write https:// instead of http://"):
        EtcdStore("http://127.0.0.1", "job", ca_file="ca.pem")


@pytest.mark.usefixtures("database_servers")
def test_the_next_endpoint_is_used_where_one_does_not_answer() -> None:
    nobody = f"127.0.0.1:{world.free_port()}"
    with EtcdStore([nobody, ADDRESSES["etcd"]], "endpoints") as store:
        assert store.endpoint == ADDRESSES["etcd"]
        store.set("key", "value")
        assert store.clone().get("key") == b"value"
        store.delete_all()


@contextmanager
def cluster(folder: Path) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Run three members; yield their processes by port."""
    ports = {name: world.free_port() for name in ("one", "two", "three")}
    peers = {name: f"http://127.0.0.1:{world.free_port()}" for name in ports}
    members = {port: etcd_member(folder, port, name, peers) for name, port in ports.items()}
    try:
        deadline = time.monotonic() + 30
        while not all(map(etcd_answers, ports.values())):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield members
    finally:
        for member in members.values():
            member.kill()
            member.wait()


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # Popen collects it


def test_a_store_goes_on_when_a_member_of_the_cluster_ends(tmp_path: Path) -> None:
    with cluster(tmp_path) as members:
        store = EtcdStore([f"127.0.0.1:{port}" for port in members], "job")
        for number in range(10):
            assert store.add("number", 1) == number + 1
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "late", 30)
            used = int(store.endpoint.rpartition(":")[2])
            members[used].kill()
            members[used].wait()
            for number in range(10, 20):
                assert store.add("number", 1) == number + 1
            store.set("late", "value")
            assert waiting.result() == b"value"
        assert store.endpoint != f"127.0.0.1:{used}"
        store.close()


@pytest.mark.parametrize("end", [kill, stop], ids=["ends", "stops"])
def test_a_wait_goes_on_at_another_member_when_the_one_that_it_watches_ends_or_stops(
    end: Callable[[int], None], tmp_path: Path
) -> None:
    with cluster(tmp_path) as members, ThreadPoolExecutor(1) as pool:
        endpoints = [f"127.0.0.1:{port}" for port in members]
        with EtcdStore(endpoints, "job") as waiter, EtcdStore(endpoints[1:], "job") as other:
            waiting = pool.submit(waiter.get, "late", 30)
            first = next(iter(members))
            while not _watches(first):
                assert not waiting.done()
            end(members[first].pid)
            other.set("late", "value")
            assert waiting.result(10) == b"value"
            assert waiter.endpoint != endpoints[0]


def test_a_server_that_is_stopped_is_lost_after_the_time_for_an_answer(tmp_path: Path) -> None:
    port = world.free_port()
    with etcd_server(tmp_path, port) as server, EtcdStore(f"127.0.0.1:{port}", "job", answer_timeout=1) as store:
        stop(server.pid)
        began = time.monotonic()
        with pytest.raises(StoreLost, match=r"no answer within \d(\.\d+)? s"):
            store.get("key")
        assert time.monotonic() - began < 10
        server.send_signal(signal.SIGCONT)
        with EtcdStore(f"127.0.0.1:{port}", "job") as patient:  # the first answer takes the server a while
            patient.set("key", "value")
        assert store.get("key") == b"value"


def test_a_time_for_answers_is_more_than_none() -> None:
    with pytest.raises(ValueError, match=r"expected an answer_timeout of more than 0 s, got 0 s"):
        EtcdStore("127.0.0.1:1", "job", answer_timeout=0)


@pytest.mark.usefixtures("database_servers")
@pytest.mark.parametrize("forwards", [True, False], ids=["answer", "request"])
def test_a_change_whose_answer_is_lost_is_repeated_at_the_next_endpoint_where_that_is_safe(forwards: bool) -> None:
    port = int(ADDRESSES["etcd"].rpartition(":")[2])
    with (
        lossy_proxy(port, b'"compare"', forwards=forwards) as proxy,
        EtcdStore([f"127.0.0.1:{proxy}", ADDRESSES["etcd"]], f"lossy-{forwards}") as store,
    ):
        if forwards:
            with pytest.raises(StoreLost, match="whether the change was made is not known"):
                store.add("number", 1)
        else:
            assert store.add("number", 1) == 1
        assert store.get("number") == b"1"
        store.delete_all()


@pytest.mark.usefixtures("database_servers")
def test_a_request_above_the_limit_of_the_server_is_refused_and_nothing_is_stored() -> None:
    with EtcdStore(ADDRESSES["etcd"], "limits") as store:
        largest = bytes(1_572_864 - 4096)
        store.set("key", largest)
        assert store.get("key") == largest
        with pytest.raises(StoreLimitError, match="is larger than the limit of 1568768 bytes"):
            store.append("key", "x")
        with pytest.raises(StoreLimitError, match="a request to etcd of .* is larger than the limit of 1572864 bytes"):
            store.set("k" * 60_000, largest)
        store.multi_set(["a", "b", "c"], [largest] * 3)
        assert store.multi_get(["a", "b", "c", "key"]) == [largest] * 4
        assert sorted(store.list_keys()) == ["a", "b", "c", "key"]
        store.delete_all()


def test_a_server_with_a_smaller_limit_than_the_store_was_told_says_so(tmp_path: Path) -> None:
    port = world.free_port()
    with etcd_server(tmp_path, port, "--max-request-bytes", "100000"):
        with EtcdStore(f"127.0.0.1:{port}", "job") as store, pytest.raises(DistStoreError, match="max_request_bytes"):
            store.set("key", bytes(200_000))
        with EtcdStore(f"127.0.0.1:{port}", "job", max_request_bytes=100_000) as store:
            with pytest.raises(StoreLimitError, match="limit of 95904 bytes"):
                store.set("key", bytes(200_000))
            store.set("key", bytes(95_904))


def _watches(port: int) -> float:
    """Return how many watches a member serves."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("etcd_debugging_mvcc_watcher_total "))


def _request(port: int, path: str, body: dict[str, object]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", f"/v3/auth/{path}", json.dumps(body))
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, content


def _require_users(port: int) -> None:
    """Let only root and the user "rank" in, who may use the keys of the job "ours"."""
    start, end = (b64encode(text.encode()).decode() for text in ("procgroup/ours/", "procgroup/ours0"))
    _request(port, "user/add", {"name": "root", "password": "admin"})
    _request(port, "role/add", {"name": "root"})
    _request(port, "user/grant", {"user": "root", "role": "root"})
    _request(port, "user/add", {"name": "rank", "password": "secret"})
    _request(port, "role/add", {"name": "ours"})
    permission = {"permType": "READWRITE", "key": start, "range_end": end}
    _request(port, "role/grant", {"name": "ours", "perm": permission})
    _request(port, "user/grant", {"user": "rank", "role": "ours"})
    _request(port, "enable", {})


def test_a_user_needs_a_password_and_a_role_for_the_keys(tmp_path: Path) -> None:
    port = world.free_port()
    endpoint = f"127.0.0.1:{port}"
    with etcd_server(tmp_path, port):
        _require_users(port)
        with EtcdStore(endpoint, "ours", user="rank", password="secret") as store, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "key", 20)
            store.set("key", "value")
            assert waiting.result() == b"value"
            store._keys.gateway._token = "outdated"
            assert store.add("number", 1) == 1
            assert store.clone().get("number") == b"1"
        for arguments in ({}, {"user": "rank", "password": "wrong"}):
            with pytest.raises(DistStoreError, match=f"etcd at {endpoint} returned an error") as caught:
                EtcdStore(endpoint, "ours", **arguments).get("key")
            assert "wrong" not in str(caught.value)
        with EtcdStore(endpoint, "theirs", user="rank", password="secret") as store:
            for call in (lambda: store.set("key", ""), lambda: store.get("key", 1), lambda: store.add("key", 1)):
                with pytest.raises(DistStoreError, match="permission denied"):
                    call()


@pytest.mark.skipif(bool(certificates.lacks()), reason=certificates.lacks())
def test_tls_proves_the_server_and_the_client(tmp_path: Path) -> None:
    ours, others = certificates.make(tmp_path / "ours"), certificates.make(tmp_path / "others")
    port = world.free_port()
    files = ("--cert-file", ours.cert, "--key-file", ours.key, "--trusted-ca-file", ours.ca, "--client-cert-auth")
    with etcd_server(tmp_path, port, *files, scheme="https"):
        endpoint = f"127.0.0.1:{port}"
        arguments = {"cert_file": ours.cert, "key_file": ours.key}
        with EtcdStore(endpoint, "job", ca_file=ours.ca, **arguments) as store, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "key", 20)
            store.set("key", "value")
            assert waiting.result() == b"value"
        with pytest.raises(DistNetworkError, match=f"{endpoint}.*certificate"):
            EtcdStore(endpoint, "job", 0.5, ca_file=others.ca, **arguments)
        with pytest.raises(DistNetworkError, match=endpoint):
            EtcdStore(endpoint, "job", 0.5, ca_file=ours.ca)


def test_the_store_needs_no_client_library() -> None:
    program = """
import sys
from procgroup.stores import etcd
print(sorted(name for name in ("grpc", "google.protobuf", "requests", "numpy", "redis") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
