"""Ranks whose process ends without a word."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time

from bugs.bug import AT_THE_DEADLINE, HOSTS_ONLY, LONG_TIMEOUT, NEEDS_MEMORY_GROUPS, death
from bugs.library import dist, expect, full, join, limit, limit_memory

LARGE = 1_000_000


def add_up(count: int = 4) -> None:
    """Make calls until one fails."""
    while True:
        total = full(count, 1.0)
        dist.all_reduce(total)
        expect(total, float(dist.get_world_size()))


def cut_the_cable() -> None:
    """Cut this host off; no connection is closed."""
    subprocess.run(["ip", "link", "set", "cable", "down"], check=True)


@death()
def killed_before_a_call() -> None:
    """Rank 1 is killed while the others wait for it."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    add_up()


@death()
def killed_in_a_large_call() -> None:
    """Rank 1 is killed somewhere in a sequence of large calls."""
    join(LONG_TIMEOUT)

    def die() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)  # BUG

    if dist.get_rank() == 1:
        threading.Thread(target=die).start()
    add_up(LARGE)


@death()
def killed_in_a_call_that_waits() -> None:
    """Rank 1 is killed in a call for which rank 2 is late."""
    join(LONG_TIMEOUT)

    def die() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)  # BUG

    if dist.get_rank() == 1:
        threading.Thread(target=die).start()
    if dist.get_rank() == 2:
        time.sleep(0.5)
    add_up()


@death()
def killed_after_a_call() -> None:
    """Rank 1 is killed when it has got its result, which the others have then, too."""
    join(LONG_TIMEOUT)
    total = full(4, 1.0)
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    expect(total, 3.0)
    dist.barrier()


@death("PeerLost", "GroupBroken")
def killed_with_calls_in_flight() -> None:
    """Rank 1 is killed when it has issued asynchronous calls."""
    join(LONG_TIMEOUT)
    totals = [full(100_000, 1.0) for _ in range(5)]
    if dist.get_rank() == 1:
        for total in totals:
            dist.all_reduce(total, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    time.sleep(0.3)
    for work in [dist.all_reduce(total, async_op=True) for total in totals]:
        work.wait()
    add_up()


@death(guilty=(0,))
def host_of_the_store_is_killed() -> None:
    """Rank 0 is killed, in whose process the store is."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    add_up()


@death(victims=(0,))
def sender_is_killed() -> None:
    """Rank 0 receives from rank 1, which is killed."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    if dist.get_rank() == 0:
        dist.recv(full(4, 0.0), 1)


@death()
def killed_where_objects_are_gathered() -> None:
    """Rank 1 is killed before it comes to an `all_gather_object`."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    dist.all_gather_object([None] * 3, {"rank": dist.get_rank()})


@death(guilty=(3,), victims=(1,), size=4)
def killed_in_a_group_of_some_ranks() -> None:
    """Rank 3 of the world, rank 1 of its group, is killed; the other group goes on."""
    join(LONG_TIMEOUT)
    groups = [dist.new_group(ranks, timeout=limit(LONG_TIMEOUT)) for ranks in ([0, 2], [1, 3])]
    mine = groups[dist.get_rank() % 2]
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    for _ in range(3 if dist.get_rank() % 2 == 0 else 1000):
        total = full(4, 1.0)
        dist.all_reduce(total, group=mine)
        expect(total, 2.0)


@death()
def exits_at_once() -> None:
    """A library of rank 1 calls os._exit."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        os._exit(3)  # BUG
    add_up()


@death("PeerLost", "PeerFailed")
def terminated() -> None:
    """The scheduler sends SIGTERM to rank 1."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        signal.raise_signal(signal.SIGTERM)  # BUG
    add_up()


@death()
def segmentation_fault() -> None:
    """An extension of rank 1 reads a null pointer."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        ctypes.string_at(0)  # BUG
    add_up()


@death()
def aborted() -> None:
    """An assertion of a C library ends rank 1."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        os.abort()  # BUG
    add_up()


@death(left_out=NEEDS_MEMORY_GROUPS)
def out_of_memory() -> None:
    """The kernel kills rank 1, because its container has no memory left."""
    join(LONG_TIMEOUT)
    if dist.get_rank() == 1:
        limit_memory(32 << 20)
        full(64 << 20, 1.0)  # BUG
    add_up()


@death("PeerLost", "CollectiveTimeout", "PeerFailed", within=AT_THE_DEADLINE, left_out=HOSTS_ONLY)
def cable_is_cut() -> None:
    """The network between rank 1's host and the others is cut, and no connection is closed."""
    join()
    if dist.get_rank() == 1:
        cut_the_cable()  # BUG
    add_up()


@death("PeerLost", "CollectiveTimeout", "PeerFailed", within=AT_THE_DEADLINE, left_out=HOSTS_ONLY)
def host_loses_its_power() -> None:
    """Rank 1's host is gone at once, with all that runs there."""
    join()
    if dist.get_rank() == 1:
        cut_the_cable()
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    add_up()


@death("PeerLost", "CollectiveTimeout", "PeerFailed", within=AT_THE_DEADLINE, left_out=HOSTS_ONLY)
def cable_is_cut_in_a_large_call() -> None:
    """The network is cut while large arrays are on it."""
    join()

    def cut() -> None:
        time.sleep(0.2)
        cut_the_cable()  # BUG

    if dist.get_rank() == 1:
        threading.Thread(target=cut).start()
    add_up(LARGE)
