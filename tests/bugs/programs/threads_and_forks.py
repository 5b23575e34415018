"""Threads that race, processes that fork, and arrays that are touched while a call is on them."""

from __future__ import annotations

import gc
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from bugs.bug import ENDS_WELL, NO_TORCH, failure, harmless, mismatch
from bugs.library import WrongResult, dist, expect, forget_arrays, full, join, refuses


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@harmless()
def child_uses_the_group_in_mid_call() -> None:
    """Rank 1 forks while an asynchronous call runs, and the child, which must be refused, makes a call."""
    join()
    total = full(1_000_000, 1.0)
    work = dist.all_reduce(total, async_op=True)
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            os._exit(0 if refuses(lambda: dist.all_reduce(full(4, 1.0))) else 1)  # BUG
        if status_of(child) != 0:
            raise WrongResult("the child's call was not refused")
    work.wait()
    expect(total, 3.0)
    dist.barrier()


@harmless()
def child_waits_for_a_work_of_its_parent() -> None:
    """Rank 1 forks while an asynchronous call runs, and the child waits for it, which must be refused."""
    join()
    total = full(1_000_000, 1.0)
    if dist.get_rank() != 1:
        time.sleep(0.3)
    work = dist.all_reduce(total, async_op=True)
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            os._exit(0 if refuses(work.wait) else 1)  # BUG
        if status_of(child) != 0:
            raise WrongResult("the child's wait was not refused")
    work.wait()
    expect(total, 3.0)


@harmless()
def child_ends_as_a_program() -> None:
    """Rank 1 forks, and the child ends with sys.exit(), which runs all that a program has for its end."""
    join()
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            sys.exit()  # BUG
        if status_of(child) != 0:
            raise WrongResult("the child did not end with status 0")
    total = full(4, 1.0)
    dist.all_reduce(total)
    expect(total, 3.0)


@mismatch("CollectiveMismatch", "GroupBroken")
def threads_call_in_another_order() -> None:
    """Two threads of each rank make a call at the same time, and on rank 1 the second one is first."""
    join()
    counts = [10, 20]
    if dist.get_rank() == 1:
        counts.reverse()

    def call(number: int) -> None:
        time.sleep(0.3 * number)
        total = full(counts[number], 1.0)
        dist.all_reduce(total)  # BUG

    with ThreadPoolExecutor(2) as threads:
        for result in [threads.submit(call, number) for number in range(2)]:
            result.result()


@harmless()
def array_is_dropped_in_mid_call() -> None:
    """Rank 1 drops its array while an asynchronous call is on it, and its memory is used again."""
    join()
    total = full(1_000_000, 1.0)
    if dist.get_rank() == 2:
        time.sleep(0.3)
    work = dist.all_reduce(total, async_op=True)
    if dist.get_rank() == 1:
        del total  # BUG
        forget_arrays()
        gc.collect()
        others = [full(1_000_000, 9.0) for _ in range(5)]
        work.wait()
        for other in others:
            expect(other, 9.0)
    else:
        work.wait()
        expect(total, 3.0)


@failure(left_out=NO_TORCH)
def array_is_resized_in_mid_call() -> None:
    """Rank 1 makes its array larger while an asynchronous call is on it, which NumPy refuses while it is in use."""
    join()
    total = full(1_000_000, 1.0)
    if dist.get_rank() == 2:
        time.sleep(0.3)
    work = dist.all_reduce(total, async_op=True)
    forget_arrays()
    if dist.get_rank() == 1:
        total.resize(2_000_000)  # BUG
    work.wait()
    dist.barrier()


@failure("PeerFailed", "CollectiveMismatch", ENDS_WELL)
def array_is_changed_in_mid_call() -> None:
    """Rank 1 clears its array while an asynchronous call is on it: the others have the sum of before or of after."""
    join()
    total = full(100, 1.0)
    if dist.get_rank() == 2:
        time.sleep(0.3)
    work = dist.all_reduce(total, async_op=True)
    if dist.get_rank() == 1:
        total[:] = 0  # BUG
    work.wait()
    if dist.get_rank() != 1:
        expect(total, 3.0 if bool((total == 3).all()) else 2.0)
