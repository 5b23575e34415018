"""Ranks that wait for each other in a cycle raise the same error; no correct program does.

The calls have time limits far beyond what the reports take.
"""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, on
from groups.toy_backend import StoreBackend

import procgroup as dist
from procgroup.groups.backend import Call
from procgroup.testing import run_ranks
from world import run

transports = pytest.mark.parametrize("transport", TRANSPORTS)

LARGE = 100_000


def caught(call: Callable[[], Any]) -> dict[str, Any]:
    """Return what the deadlock says that this call ran into."""
    try:
        call()
    except dist.Deadlock as error:
        lines = {rank: re.fullmatch(r"(.*) at test_deadlocks\.py:\d+", wait) for rank, wait in error.waits.items()}
        assert all(lines.values()), error.waits
        waits = {rank: line[1] for rank, line in lines.items() if line}
        return {"waits": waits, "text": str(error), "op": error.op, "rank": error.rank}
    raise AssertionError("expected a deadlock")


def meet(rank: int, size: int) -> None:
    """Make sure, by messages alone, that every rank has seen the end of the last case."""
    token = np.zeros(1)
    for peer in range(size):
        if peer != rank:
            dist.send(token, peer, tag=99)
    for peer in range(size):
        if peer != rank:
            dist.recv(token, peer, tag=99)


def cycles_of_messages(rank: int, size: int) -> dict[str, Any]:
    """One cycle for each pair of ranks; then they all meet, because a group is not broken by it."""
    dist.init_process_group(timeout=60)
    array, large, peer = np.zeros(3), np.zeros(LARGE), rank ^ 1
    cases: list[Callable[[], Any]] = [
        lambda: dist.recv(array, peer),
        lambda: dist.send(large, peer, tag=1),  # above the eager size: it waits for its receive
        lambda: dist.recv(array, peer, tag=2) if rank % 2 else dist.send(large, peer, tag=3),
    ]
    found = caught(cases[rank // 2])
    meet(rank, size)
    return found


@transports
def test_two_ranks_that_wait_for_each_other_are_told_what_each_is_in(transport: str) -> None:
    outcomes = run(cycles_of_messages, 6, timeout=60, environment=on(transport))
    expected = [
        {0: "recv from 1", 1: "recv from 0"},
        {2: "send to 3 with tag 1", 3: "send to 2 with tag 1"},
        {4: "send to 5 with tag 3", 5: "recv from 4 with tag 2"},
    ]
    for rank, found in enumerate(outcomes):
        assert found["waits"] == expected[rank // 2]
        assert found["rank"] == rank and found["op"] == found["waits"][rank].split()[0]
    for found in outcomes[:2]:
        line = r"test_deadlocks\.py:\d+"
        assert re.search(rf"deadlock: rank 0 in recv from 1 at {line}, rank 1 in recv from 0 at {line}", found["text"])


def three_ranks(rank: int, size: int) -> list[Any]:
    """A cycle of three; then rank 0 in a collective and rank 1 in a receive, and rank 2 in the same collective."""
    dist.init_process_group(timeout=60)
    afterwards = dist.new_group()
    found: list[Any] = [caught(lambda: dist.recv(np.zeros(1), (rank + 1) % size))]
    meet(rank, size)
    if rank == 1:
        found.append(caught(lambda: dist.recv(np.zeros(1), 0)))
    elif rank == 0:
        found.append(caught(lambda: dist.all_reduce(np.zeros(1))))
    else:
        with pytest.raises(dist.PeerFailed) as failed:
            dist.all_reduce(np.zeros(1))
        found.append(str(failed.value))
    dist.barrier(group=afterwards)  # no process ends before all have raised
    return found


@transports
def test_longer_cycles_and_collectives_name_all_their_members_and_nobody_else(transport: str) -> None:
    outcomes = run(three_ranks, 3, timeout=60, environment=on(transport))
    for found in outcomes:
        assert found[0]["waits"] == {0: "recv from 1", 1: "recv from 2", 2: "recv from 0"}
    for found in outcomes[:2]:
        assert found[1]["waits"] == {0: "all_reduce #1, waiting for rank 1", 1: "recv from 0"}
    assert "rank 0 failed: deadlock" in outcomes[2][1], "a rank that waits for one in the cycle is notified"


LONG = 2.5
"""Longer than a deadlock takes to be found."""


def a_thread_sends(rank: int, peer: int) -> None:
    got = np.zeros(1)
    if rank % 2:
        dist.recv(got, peer, tag=1)
        dist.send(got, peer, tag=2)
        return
    sender = threading.Thread(target=lambda: (time.sleep(LONG), dist.send(np.ones(1), peer, tag=1)))
    sender.start()
    dist.recv(got, peer, tag=2)
    sender.join()


def a_short_limit_ends_the_wait(rank: int, peer: int) -> None:
    got = np.zeros(1)
    if rank % 2:
        dist.recv(got, peer)
        return
    with pytest.raises(dist.CollectiveTimeout):
        dist.recv(got, peer, timeout=LONG)
    dist.send(got, peer)


def an_alarm_sends(rank: int, peer: int) -> None:
    got = np.zeros(1)
    if rank % 2:
        dist.recv(got, peer, tag=1)
        dist.send(got, peer, tag=2)
        return
    signal.signal(signal.SIGALRM, lambda *_: dist.send(np.ones(1), peer, tag=1))
    signal.setitimer(signal.ITIMER_REAL, LONG)
    dist.recv(got, peer, tag=2)


def a_rank_is_late(rank: int, peer: int) -> None:
    got = np.zeros(1)
    if rank % 2:
        time.sleep(LONG)
        dist.send(got, peer, tag=2)
        dist.send(got, peer, tag=1)
        return
    pending: Any = dist.irecv(np.zeros(1), peer, tag=1)
    dist.recv(got, peer, tag=2)
    pending.wait()


def a_callback_sends(rank: int, peer: int) -> None:
    """The receive's callback answers, on a thread of procgroup's, the message that the other rank waits for."""
    got = np.zeros(1)
    if rank % 2:
        time.sleep(LONG)
        dist.send(got, peer, tag=1)
        dist.recv(got, peer, tag=2)
        dist.send(got, peer, tag=3)
        return
    pending: Any = dist.irecv(np.zeros(1), peer, tag=1)
    pending.get_future().add_done_callback(lambda _: (time.sleep(LONG), dist.send(np.ones(1), peer, tag=2)))
    dist.recv(got, peer, tag=3)


SOUND = [a_callback_sends, a_thread_sends, a_short_limit_ends_the_wait, an_alarm_sends, a_rank_is_late]


def sound_programs(rank: int, size: int) -> None:
    """Waits that look like cycles, and are none: one program for each pair of ranks."""
    dist.init_process_group(timeout=60)
    SOUND[rank // 2](rank, rank ^ 1)


def late_on_each_host(rank: int, size: int, is_asynchronous: bool) -> float:
    """The leaders of two hosts, ranks 0 and 1, wait for the other ranks of their hosts."""
    dist.init_process_group(timeout=60)
    dist.barrier()
    if rank >= 2:
        time.sleep(LONG)
    found = np.ones(1)
    work: Any = dist.all_reduce(found, async_op=is_asynchronous)
    if work is not None:
        work.wait()
    return float(found[0])


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("size", [3, 4, 5])
def test_leaders_that_wait_for_late_ranks_of_their_hosts_are_not_called_deadlocked(
    size: int, is_asynchronous: bool
) -> None:
    assert run(late_on_each_host, size, args=(is_asynchronous,), environment=on("spanning")) == [size] * size


QUICK_SEEDS = (5,)


def call_at_random(seed: int, size: int) -> None:
    """Make the same random calls on all ranks, on three groups; each rank is late in about a third of them."""
    choices, lateness = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    groups: list[Any] = [dist.group.WORLD]
    groups += [dist.new_group(choices.sample(range(size), choices.randint(2, size))) for _ in range(2)]
    operations: list[Callable[[Any, bool], Any]] = [
        lambda group, is_async: dist.barrier(group, async_op=is_async),
        lambda group, is_async: dist.all_reduce(np.ones(1), group=group, async_op=is_async),
        lambda group, is_async: dist.all_reduce(np.ones(LARGE), group=group, async_op=is_async),
        lambda group, is_async: dist.broadcast(np.ones(7), group=group, group_src=0, async_op=is_async),
        lambda group, is_async: dist.reduce(np.ones(7), group=group, group_dst=1, async_op=is_async),
    ]
    pending: list[Any] = []
    for _ in range(12):
        group, operation = choices.choice(groups), choices.choice(operations)
        is_async, waits = choices.random() < 0.4, choices.random() < 0.5
        if lateness.random() < 0.35:
            time.sleep(0.4)  # ranks that are threads take a wait of 0.1 s for a part of a deadlock
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            pending.append(operation(group, is_async))
        if waits:
            while pending:
                if (work := pending.pop(0)) is not None:
                    work.wait()
    dist.barrier()


def call_at_random_on_hosts(rank: int, size: int, seed: int) -> None:
    choices = random.Random(seed)
    ranks = choices.randint(3, 7)
    run_ranks(call_at_random, ranks, seed, ranks, hosts=[choices.randrange(3) for _ in range(ranks)])


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in QUICK_SEEDS else pytest.mark.slow) for seed in range(60)]
)
def test_late_ranks_of_several_hosts_and_groups_are_not_called_deadlocked(seed: int) -> None:
    run(call_at_random_on_hosts, 1, args=(seed,))  # in a process that runs no other threads


class GoesOn(StoreBackend):
    """A send takes some time after the receiver has the bytes, and waits for nobody."""

    def move(self, call: Call) -> Iterator[Any]:
        yield from super().move(call)
        ends = time.monotonic() + (0.8 if call.op == "send" else 0)
        while time.monotonic() < ends:
            yield None


def send_twice() -> None:
    if dist.get_rank() == 1:
        for tag in range(2):
            dist.send(np.ones(3), 0, tag=tag)
    else:
        for tag in range(2):
            dist.recv(np.zeros(3), 1, tag=tag)


def send_twice_on_hosts(rank: int, size: int, hosts: list[int] | None) -> None:
    dist.Backend.register_backend("goeson", GoesOn)
    run_ranks(send_twice, 2, hosts=hosts, backend="goeson")


@pytest.mark.parametrize("hosts", [None, [0, 1]], ids=["one host", "two hosts"])
def test_a_send_by_another_backend_may_go_on_when_the_receiver_has_it_and_has_left(hosts: list[int] | None) -> None:
    run(send_twice_on_hosts, 1, args=(hosts,))


def wait_after_a_callback(rank: int, size: int) -> dict[str, Any]:
    dist.init_process_group(timeout=60)
    has_run = threading.Event()
    pending: Any = dist.irecv(np.zeros(3), 1 - rank)
    pending.get_future().add_done_callback(lambda _: has_run.set())
    assert "procgroup-completions" in [thread.name for thread in threading.enumerate()]
    dist.barrier()
    dist.send(np.ones(3), 1 - rank)
    assert has_run.wait(20)
    return caught(lambda: dist.recv(np.zeros(3), 1 - rank))


@transports
def test_a_thread_of_procgroup_that_waits_for_work_ends_no_wait(transport: str) -> None:
    found = run(wait_after_a_callback, 2, timeout=40, environment=on(transport))
    assert [one["waits"] for one in found] == [{0: "recv from 1", 1: "recv from 0"}] * 2


def wait_after_a_compiled_call(rank: int, size: int) -> str:
    dist.init_process_group(timeout=12)
    dist.group.WORLD.await_before_calls(lambda: None)  # as the compilation of a call by JAX does
    with pytest.raises(dist.DistError) as raised:
        dist.recv(np.zeros(1), 1 - rank)
    return type(raised.value).__name__


def test_calls_that_another_library_may_make_from_its_threads_could_end_a_wait() -> None:
    raised = run(wait_after_a_compiled_call, 2)
    assert "CollectiveTimeout" in raised and "Deadlock" not in raised


@transports
def test_no_sound_program_is_called_deadlocked(transport: str) -> None:
    run(sound_programs, 2 * len(SOUND), timeout=250, environment=on(transport))
