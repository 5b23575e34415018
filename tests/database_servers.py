"""Real servers of etcd and Redis, from the distribution's packages, for as long as a test needs them."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import world
from forked_ranks import die_with_parent
from two_hosts import Host

_SECONDS_TO_START = 30.0
_OPEN_URL = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"
_PEER_PORT = 2380
_PEER = f"http://127.0.0.1:{_PEER_PORT}"


def lacks_etcd() -> str:
    """Return what this machine lacks for tests with etcd; "" where it lacks nothing."""
    return "" if shutil.which("etcd") else "not installed: etcd (Debian's package etcd-server)"


def lacks_redis() -> str:
    """Return what this machine lacks for tests with Redis; "" where it lacks nothing."""
    if shutil.which("redis-server") is None:
        return "not installed: redis-server (Debian's package redis-server)"
    return "" if find_spec("redis") else "not installed: the client library redis"


@contextmanager
def running(command: Sequence[str], folder: Path, answers: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server with its files in ``folder``, wait until it answers, yield it, and kill it."""
    server = _start(command, folder, "log")
    try:
        deadline = time.monotonic() + _SECONDS_TO_START
        while not answers():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not answer:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)
        yield server
    finally:
        server.kill()
        server.wait()


def _start(command: Sequence[str], folder: Path, log_name: str) -> subprocess.Popen[bytes]:
    """Start a server that ends with this process, however that ends."""
    with (folder / log_name).open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
        )


@contextmanager
def redis_server(
    folder: Path, port: int, *arguments: str, answering: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server without TLS at ``port``; 0 for none, then ``answering`` is the port to wait for."""
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", *arguments]
    # A server that expects TLS or a password has answered, too, when it has taken the connection.
    with running(command, folder, lambda: _takes_connections(answering or port)) as server:
        yield server


@contextmanager
def etcd_server(folder: Path, port: int, *arguments: str, scheme: str = "http") -> Iterator[subprocess.Popen[bytes]]:
    """Start a cluster of one member."""
    peer = f"http://127.0.0.1:{world.free_port()}"
    arguments = (*_peers(peer, f"default={peer}"), *arguments)
    with running(_etcd(folder, port, scheme, *arguments), folder, lambda: _has_leader(port, scheme)) as server:
        yield server


@contextmanager
def redis_on(host: Host, folder: Path, port: int) -> Iterator[None]:
    """Start a server without a password at the address of a host of its own."""
    command = ["redis-server", "--bind", host.address, "--port", str(port), "--save", "", "--protected-mode", "no"]
    answers = ["redis-cli", "-h", host.address, "-p", str(port), "ping"]
    with running(host.command(command), folder, lambda: _succeeds(host, answers)):
        yield


@contextmanager
def etcd_on(host: Host, folder: Path, port: int) -> Iterator[None]:
    """Start a cluster of one member at the address of a host of its own."""
    command = _etcd(folder, port, "http", *_peers(_PEER, f"default={_PEER}"), address=host.address)
    answers = [sys.executable, "-c", _OPEN_URL, f"http://{host.address}:{port}/health"]
    with running(host.command(command), folder, lambda: _succeeds(host, answers)):
        yield


def etcd_member(folder: Path, port: int, name: str, peers: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start one member of a cluster of several, given the URLs of all by name; the caller kills it."""
    cluster = ",".join(f"{name}={url}" for name, url in peers.items())
    arguments = ("--name", name, *_peers(peers[name], cluster))
    return _start(_etcd(folder / name, port, "http", *arguments), folder, f"{name}.log")


def etcd_member_on(host: Host, folder: Path, port: int, hosts: Sequence[Host]) -> subprocess.Popen[bytes]:
    """Start one host's member of a cluster on ``hosts``, with the files that it left; the caller kills it."""
    peers = {other.namespace: f"http://{other.address}:{_PEER_PORT}" for other in hosts}
    cluster = ",".join(f"{name}={url}" for name, url in peers.items())
    arguments = ("--name", host.namespace, *_peers(peers[host.namespace], cluster))
    # The default from 3.5 on: without it a member that was cut off forces elections when it is back.
    command = _etcd(folder / host.namespace, port, "http", "--pre-vote", *arguments, address=host.address)
    return _start(host.command(command), folder, f"{host.namespace}.log")


def _peers(peer: str, cluster: str) -> tuple[str, ...]:
    return (*("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer), *("--initial-cluster", cluster))


def _etcd(folder: Path, port: int, scheme: str, *arguments: str, address: str = "127.0.0.1") -> list[str]:
    client = f"{scheme}://{address}:{port}"
    urls = ("--listen-client-urls", client, "--advertise-client-urls", client)
    return ["etcd", "--data-dir", str(folder / "data"), *urls, *arguments]


def etcd_answers(port: int) -> bool:
    """Return whether the cluster of the member at this port has a leader."""
    return _has_leader(port, "http")


def _has_leader(port: int, scheme: str) -> bool:
    if scheme == "https":
        return _takes_connections(port)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return bool(json.loads(connection.getresponse().read())["health"] == "true")
    except OSError:
        return False
    finally:
        connection.close()


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def _succeeds(host: Host, command: Sequence[str]) -> bool:
    return subprocess.run(host.command(command), capture_output=True).returncode == 0
