"""Ranks that are threads and wait for each other in a cycle raise Deadlock long before the world's deadline.

Nothing else is taken for a cycle: a rank that is late, or a call that another thread is going to make. A thread that
another test has left behind might make one; so each of these tests plays in a process of its own.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.testing import RanksFailed, run_ranks
from world import placed, run

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])

LONG = 0.6
"""Some times longer than a cycle of threads takes to be found."""


def deadlocks(function: Callable[[], Any], size: int, transport: str) -> dict[int, BaseException]:
    """Return what each rank raised. At the deadline it would be RanksTimeout; a cycle takes some 0.2 seconds."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(function, size, **placed(transport, size), timeout=25)
    return dict(caught.value.errors)


def receive_in_a_cycle(rank: int, world_size: int, size: int, transport: str) -> None:
    errors = deadlocks(lambda: dist.recv(np.zeros(1), (dist.get_rank() + 1) % size), size, transport)
    assert sorted(errors) == list(range(size))
    for error in errors.values():
        assert isinstance(error, dist.Deadlock)
        waits = {rank: wait.rpartition(" at ")[0] for rank, wait in error.waits.items()}
        assert waits == {rank: f"recv from {(rank + 1) % size}" for rank in range(size)}
    line = r"test_deadlocks_of_threads\.py:\d+"
    assert re.search(rf"deadlock: rank 0 in recv from 1 at {line}, rank 1 in recv from ", str(errors[0]))


@transports
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_cycle_of_receives_is_reported_on_each_of_its_ranks(size: int, transport: str) -> None:
    run(receive_in_a_cycle, 1, args=(size, transport))


def meet_or_receive(rank: int, world_size: int, transport: str) -> None:
    def meet_or_receive() -> None:
        if dist.get_rank() == 1:
            dist.recv(np.zeros(1), 0)
        else:
            dist.barrier()

    errors = deadlocks(meet_or_receive, 2, transport)
    assert [type(errors[rank]) for rank in range(2)] == [dist.Deadlock] * 2
    line = r"test_deadlocks_of_threads\.py:\d+"
    found = re.findall(
        rf"deadlock: rank 0 in barrier #1, waiting for rank 1 at {line}, rank 1 in recv from 0", str(errors[0])
    )
    assert len(found) == 1


@transports
def test_a_receive_against_a_collective_is_one_too(transport: str) -> None:
    run(meet_or_receive, 1, args=(transport,))


def receive_and_go_on(rank: int, world_size: int, transport: str) -> None:
    def receive_and_go_on() -> float:
        for _ in range(3):
            with pytest.raises(dist.Deadlock):
                dist.recv(np.zeros(1), 1 - dist.get_rank())
            total = np.ones(1)
            dist.all_reduce(total)
        return float(total[0])

    assert run_ranks(receive_and_go_on, 2, **placed(transport, 2), timeout=20) == [2, 2]


@transports
def test_the_group_goes_on_after_a_cycle_of_messages(transport: str) -> None:
    run(receive_and_go_on, 1, args=(transport,))


def pass_a_token(rank: int, world_size: int, transport: str) -> None:
    def pass_on() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        pause, token = random.Random(rank), np.zeros(1)
        for _ in range(5):
            if rank > 0:
                dist.recv(token, rank - 1)
            time.sleep(pause.uniform(0, 0.3))
            dist.send(token + 1, (rank + 1) % size)
            if rank == 0:
                dist.recv(token, size - 1)
        dist.barrier()

    run_ranks(pass_on, 3, **placed(transport, 3), timeout=25)


@transports
def test_a_late_rank_is_no_deadlock(transport: str) -> None:
    """A token goes round, at random speed, while every other rank waits for it."""
    run(pass_a_token, 1, args=(transport,))


def send_later(rank: int, world_size: int, transport: str) -> None:
    def send_later() -> None:
        peer, got, group = 1 - dist.get_rank(), np.zeros(1), dist.group.WORLD
        assert group is not None
        if dist.get_rank() == 1:
            dist.recv(got, peer, tag=1)
            dist.send(got, peer, tag=2)
            return
        sender = threading.Timer(LONG, lambda: group.send(np.ones(1), peer, tag=1))
        sender.start()
        dist.recv(got, peer, tag=2)
        sender.join()

    run_ranks(send_later, 2, **placed(transport, 2), timeout=20)


@transports
def test_a_thread_of_a_rank_may_still_send(transport: str) -> None:
    run(send_later, 1, args=(transport,))


def give_up_and_send(rank: int, world_size: int, transport: str) -> None:
    def give_up_and_send() -> None:
        peer, got = 1 - dist.get_rank(), np.zeros(1)
        if dist.get_rank() == 1:
            dist.recv(got, peer)
            return
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(dist.CollectiveTimeout):
            group.recv(got, peer, timeout=LONG)
        dist.send(got, peer)

    run_ranks(give_up_and_send, 2, **placed(transport, 2), timeout=20)


@transports
def test_a_short_limit_ends_its_wait_as_it_says(transport: str) -> None:
    run(give_up_and_send, 1, args=(transport,))
