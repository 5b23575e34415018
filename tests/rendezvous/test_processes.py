"""Real processes find each other over TCP and over a file, and tell each other what is wrong."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from procgroup.errors import DistNetworkError, PeerLost, RendezvousConflict, RendezvousTimeout
from procgroup.rendezvous.handlers import rendezvous
from procgroup.rendezvous.join import join
from world import attempt, free_port, run, run_command, start

JOIN = """
import sys, time
from procgroup.rendezvous.handlers import rendezvous
from procgroup.rendezvous.join import join
url, rank, size, timeout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
store, rank, size = next(rendezvous(url, rank, size, timeout=timeout))
join(store, rank, size, timeout)
"""


def meet(rank: int, size: int, url: str, timeout: float = 15) -> Any:
    store, rank, size = next(rendezvous(url, rank, size, timeout=timeout))
    world = join(store, rank, size, timeout)
    store.set(f"from {rank}", str(os.getpid()))
    pids = [int(value) for value in store.multi_get([f"from {other}" for other in range(size)])]
    assert pids == [member.pid for member in world.members]
    store.barrier("all have read", size)
    return world.key


def meet_by_environment(rank: int, size: int) -> Any:
    return meet(-1, -1, "env://")


def meet_with_own_size(rank: int, size: int, url: str, sizes: list[int]) -> Any:
    return meet(rank, sizes[rank], url, 10)


def meet_as(rank: int, size: int, url: str, ranks: list[int], world_size: int, timeout: float = 10) -> Any:
    return meet(ranks[rank], world_size, url, timeout)


def urls(tmp_path: Any) -> dict[str, str]:
    return {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/meeting point"}


@pytest.mark.parametrize("scheme", ["tcp", "file"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_find_each_other(scheme: str, size: int, tmp_path: Any) -> None:
    assert len(set(run(meet, size, args=(urls(tmp_path)[scheme],)))) == 1


def test_ranks_find_each_other_by_the_environment() -> None:
    assert len(set(run(meet_by_environment, 3))) == 1


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_processes_that_claim_one_rank_are_named_on_all_sides(scheme: str, tmp_path: Any) -> None:
    url = urls(tmp_path)[scheme]
    with start(meet_as, 2, args=(url, [0, 1], 3)) as world:
        store, _, _ = next(rendezvous(url, 1, 3, timeout=10))
        wait_until_claimed(url, [0, 1], 3)
        started = time.monotonic()
        with pytest.raises(RendezvousConflict) as caught:
            join(store, 1, 3, 10)
        store.close()
        outcomes = world.wait()
        assert time.monotonic() - started < 6
        host = socket.gethostname()
        assert str(caught.value) == f"rank 1 joined twice: {host} pid {world.pids[1]}, {host} pid {os.getpid()}"
    assert [str(outcome.error) for outcome in outcomes] == [str(caught.value)] * 2


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_unequal_world_sizes_are_named_on_all_sides(scheme: str, tmp_path: Any) -> None:
    outcomes = attempt(meet_with_own_size, 2, args=(urls(tmp_path)[scheme], [4, 8]))
    for outcome in outcomes:
        assert isinstance(outcome.error, RendezvousConflict), outcome
        text = str(outcome.error)
        assert text.startswith("world_size disagreement: rank ")
        assert "rank 0 says 4" in text
        assert "rank 1 says 8" in text


def test_a_store_that_nobody_hosts_is_a_network_error_within_the_timeout() -> None:
    started = time.monotonic()
    with pytest.raises(DistNetworkError, match="timed out after 500ms while trying to connect"):
        meet(1, 2, f"tcp://127.0.0.1:{free_port()}", 0.5)
    assert time.monotonic() - started < 5


def test_a_port_that_is_taken_is_named_on_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(DistNetworkError, match="EADDRINUSE"):
        meet(0, 2, f"tcp://127.0.0.1:{taken.getsockname()[1]}", 5)


def test_a_foreign_server_on_the_port_is_told_apart_from_a_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        command = [sys.executable, "-c", JOIN, f"tcp://127.0.0.1:{port}", "1", "2", "2"]
        with foreign_that_talks(foreign):
            done = run_command(command)
    assert done.returncode == 1
    assert "DistNetworkError" in done.stderr


class foreign_that_talks:  # noqa: N801 - reads as a context
    """Answers whoever connects with something that is not the protocol, as another service on the port does."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.thread = threading.Thread(target=self.serve, daemon=True)

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 20)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join(5)


def test_a_foreign_client_harms_nobody() -> None:
    port = free_port()
    with start(meet, 2, args=(f"tcp://127.0.0.1:{port}",)) as world:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as foreign:
                    foreign.sendall(b"GET / HTTP/1.1\r\nHost: store\r\n\r\n")
                break
            except OSError:
                time.sleep(0.01)
        assert all(outcome.ok for outcome in world.wait(20))


def wait_for_one_more(rank: int, size: int, url: str) -> Any:
    return meet(rank, size + 1, url, 30)


def wait_until_claimed(url: str, ranks: list[int], size: int) -> None:
    """Wait until these ranks have claimed their places in the first round."""
    store, _, _ = next(rendezvous(url, size - 1, size, timeout=10))
    store.wait([f"rendezvous/0/rank/{rank}" for rank in ranks], 10)
    store.close()


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ctrl_c_ends_the_waiting_at_once_and_the_others_learn_why(scheme: str, tmp_path: Any) -> None:
    url = urls(tmp_path)[scheme]
    with start(wait_for_one_more, 2, args=(url,)) as world:
        wait_until_claimed(url, [0, 1], 3)
        started = time.monotonic()
        world.kill(1, signal.SIGINT)
        outcomes = world.wait()
        assert time.monotonic() - started < 5
    assert isinstance(outcomes[1].error, KeyboardInterrupt), outcomes
    assert "rank 1 (" in str(outcomes[0].error)
    assert "left: KeyboardInterrupt" in str(outcomes[0].error)


def test_when_the_host_of_the_store_dies_the_others_learn_it_at_once(tmp_path: Any) -> None:
    url = urls(tmp_path)["tcp"]
    with start(wait_for_one_more, 2, args=(url,)) as world:
        wait_until_claimed(url, [0, 1], 3)
        world.kill(0)
        outcomes = world.wait()
    error = outcomes[1].error
    assert isinstance(error, PeerLost) and error.peer == 0 and error.pid == world.pids[0], outcomes
    assert "which hosts the store, ended" in str(error)


def test_a_missing_rank_is_named_on_all_sides_after_the_timeout(tmp_path: Any) -> None:
    with ExitStack() as stack:
        arguments = [(url, [0, 2], 3, 7.5) for url in urls(tmp_path).values()]
        together = [stack.enter_context(start(meet_as, 2, args=each)) for each in arguments]
        outcomes_of_each = [world.wait(30) for world in together]
    for outcomes in outcomes_of_each:
        for outcome in outcomes:
            assert isinstance(outcome.error, RendezvousTimeout), outcome
            assert outcome.error.missing == (1,)
            assert sorted(outcome.error.joined) == [0, 2]
        assert "waiting for rank 1 of 3 (joined: 0@" in outcomes[0].output
        assert "waiting for" not in outcomes[1].output


def test_a_rank_0_that_is_started_twice_is_named() -> None:
    place = f"127.0.0.1:{free_port()}"
    store = next(rendezvous(f"tcp://{place}", 0, 2, timeout=5))[0]
    command = [sys.executable, "-c", JOIN, f"tcp://{place}", "0", "2", "2"]
    done = run_command(command)
    assert "RendezvousConflict: rank 0 is there already: " in done.stderr, done.stderr
    assert f"pid {os.getpid()} hosts the store at {place}" in done.stderr
    store.close()
