"""Ranks that are alive and do not come."""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import signal
import subprocess
import threading
import time

from bugs.bug import TIMEOUT, absence, harmless
from bugs.library import dist, expect, full, join, limit

FOREVER = 20 * TIMEOUT


def add_up() -> None:
    """Make calls until one fails."""
    while True:
        total = full(4, 1.0)
        dist.all_reduce(total)
        expect(total, float(dist.get_world_size()))


@absence()
def data_take_too_long() -> None:
    """Rank 1 sleeps in its data loader."""
    join()

    def load_batch() -> None:
        time.sleep(FOREVER)  # BUG

    if dist.get_rank() == 1:
        load_batch()
    add_up()


@absence(guilty=(0,))
def checkpoint_takes_too_long() -> None:
    """Rank 0 saves a checkpoint for longer than the timeout, and the others wait at a barrier."""
    join()

    def save() -> None:
        time.sleep(FOREVER)  # BUG

    if dist.get_rank() == 0:
        save()
    dist.barrier()


@absence()
def asynchronous_call_is_waited_for() -> None:
    """Rank 1 computes without end, and the others wait for their asynchronous call."""
    join()
    if dist.get_rank() == 1:
        time.sleep(FOREVER)  # BUG
    total = full(100_000, 1.0)
    dist.all_reduce(total, async_op=True).wait()


@absence(guilty=(3,), victims=(1,), size=4)
def rank_of_a_group_is_missing() -> None:
    """Rank 3 of the world, rank 1 of its group, does not come to the group's call."""
    join()
    groups = [dist.new_group(ranks, timeout=limit()) for ranks in ([0, 2], [1, 3])]
    if dist.get_rank() == 3:
        time.sleep(FOREVER)  # BUG
    total = full(4, 1.0)
    dist.all_reduce(total, group=groups[dist.get_rank() % 2])
    expect(total, 2.0)


@absence()
def loops_without_end() -> None:
    """Rank 1 searches without end, in Python."""
    join()

    def search() -> bool:
        return any(step < 0 for step in itertools.count())  # BUG

    if dist.get_rank() == 1:
        search()
    add_up()


@absence()
def holds_the_gil_without_end() -> None:
    """Rank 1 is in a C function without end that holds the interpreter's lock."""
    join()
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    if dist.get_rank() == 1:
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)  # BUG
    add_up()


@absence()
def waits_for_a_lock() -> None:
    """Rank 1 takes a lock twice."""
    join()
    lock = threading.Lock()
    if dist.get_rank() == 1:
        lock.acquire()
        lock.acquire()  # BUG
    add_up()


@absence()
def waits_for_a_worker() -> None:
    """Rank 1 waits for a thread that has ended without a result."""
    join()
    results: queue.Queue[int] = queue.Queue()
    if dist.get_rank() == 1:
        threading.Thread(target=int).start()
        results.get()  # BUG
    add_up()


@absence()
def waits_for_a_command() -> None:
    """Rank 1 waits for a command that it has started, which does not end."""
    join()
    if dist.get_rank() == 1:
        subprocess.run(["sleep", "5"], check=False)  # BUG
    add_up()


@absence(has_line=False)
def stopped() -> None:
    """Somebody has stopped rank 1, with SIGSTOP or in a debugger."""
    join()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # BUG
    add_up()


@absence(has_line=False)
def stopped_in_a_large_call() -> None:
    """Rank 1 is stopped somewhere in a sequence of large calls."""
    join()

    def stop() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSTOP)  # BUG

    if dist.get_rank() == 1:
        threading.Thread(target=stop).start()
    while True:
        total = full(1_000_000, 1.0)
        dist.all_reduce(total)
        expect(total, 3.0)


@harmless()
def comes_late() -> None:
    """Rank 1 is slow, but comes within the timeout."""
    join()
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT / 2)  # BUG
    total = full(4, 1.0)
    dist.all_reduce(total)
    expect(total, 3.0)


@harmless()
def is_stopped_for_a_while() -> None:
    """Rank 1 is stopped, and goes on within the timeout."""
    join()
    if dist.get_rank() == 1:
        with subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)  # BUG
    total = full(4, 1.0)
    dist.all_reduce(total)
    expect(total, 3.0)
