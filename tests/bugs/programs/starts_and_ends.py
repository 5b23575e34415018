"""Ranks that go wrong while groups are made, and while programs end."""

from __future__ import annotations

import os
import signal
import sys
import time

from bugs.bug import (
    AT_THE_DEADLINE,
    ENDS_WELL,
    LONG_TIMEOUT,
    NO_MPI,
    TIMEOUT,
    absence,
    deadlock,
    death,
    failure,
    harmless,
    mismatch,
)
from bugs.library import RANK, SIZE, dist, expect, full, join, limit, start, start_and_die

FOREVER = 20 * TIMEOUT
NEVER_COME = ("RendezvousTimeout", "RendezvousError")
"""Errors of ranks that wait for others which never start. Under mpiexec a launcher says how many have come."""
LATE = "RendezvousError"
"""What a rank raises that comes when the start of the others has failed."""


@absence(*NEVER_COME, is_stuck=False, has_line=False)
def ends_before_the_start() -> None:
    """Rank 1 exits before it has called `init_process_group`."""
    if RANK == 1:
        sys.exit()  # BUG
    start()


@absence(*NEVER_COME, is_stuck=False, has_line=False)
def killed_before_the_start() -> None:
    """Rank 1 is killed before it has called `init_process_group`."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    start()


@absence(*NEVER_COME, has_line=False)
def sleeps_before_the_start() -> None:
    """Rank 1 is unpacking its data when the others' time to start has passed."""
    if RANK == 1:
        time.sleep(FOREVER)  # BUG
    start()


@absence(*NEVER_COME, "DistNetworkError", "HostMissing", guilty=(0,), is_stuck=False, has_line=False)
def host_of_the_store_never_starts() -> None:
    """Rank 0, at which the others are to meet, exits before it has called `init_process_group`."""
    if RANK == 0:
        sys.exit()  # BUG
    start()


@absence(*NEVER_COME, is_stuck=False, has_line=False, left_out=NO_MPI)
def port_is_wrong_on_one_rank() -> None:
    """Rank 1 has a port from an older job script."""
    if RANK == 1:
        os.environ["MASTER_PORT"] = "9"  # BUG
    start()


@death("RendezvousTimeout", "PeerLost", LATE, within=AT_THE_DEADLINE)
def killed_when_it_has_reached_the_store() -> None:
    """Rank 1 is killed when it is connected to the store and has not said yet that it is there."""
    start_and_die(1)  # BUG


@death("RendezvousTimeout", "PeerLost", "CollectiveTimeout", LATE, within=AT_THE_DEADLINE)
def killed_while_it_joins() -> None:
    """Rank 1 is killed when it has begun to say at the store that it is there."""
    start_and_die(5)  # BUG


@death("PeerLost", "CollectiveTimeout", LATE)
def killed_while_addresses_are_exchanged() -> None:
    """Rank 1 is killed when all have met, between the requests by which the ranks learn each other's addresses."""
    start_and_die(14)  # BUG


@absence("CollectiveTimeout", "RendezvousTimeout", has_line=False)
def stopped_while_addresses_are_exchanged() -> None:
    """Rank 1 is stopped when all have met, between the requests by which the ranks learn each other's addresses."""
    start_and_die(14, signal.SIGSTOP)  # BUG


@death()
def killed_at_the_end_of_the_start() -> None:
    """Rank 1 is killed when it returns from `init_process_group`."""
    start_and_die(1_000_000)  # BUG


@mismatch("RendezvousConflict", left_out=NO_MPI, has_line=False)
def world_size_differs() -> None:
    """Rank 1 has the world size of another job."""
    start(rank=RANK, world_size=4 if RANK == 1 else SIZE)  # BUG


@mismatch("RendezvousConflict", left_out=NO_MPI, has_line=False)
def world_size_differs_and_a_rank_is_late() -> None:
    """Rank 1 has the world size of another job, and rank 2 starts when the others have found that out."""
    if RANK == 2:
        time.sleep(0.5)
    start(rank=RANK, world_size=4 if RANK == 1 else SIZE)  # BUG


# A rank that comes when the start of the others has failed waits for them until its deadline.
@mismatch(
    "RendezvousConflict",
    "RendezvousTimeout",
    guilty=(2,),
    names=(1,),
    left_out=NO_MPI,
    has_line=False,
    within=AT_THE_DEADLINE,
    guilty_errors=("RendezvousConflict", "DistNetworkError"),
)
def same_rank_twice() -> None:
    """Two processes start as rank 1, because a script has not counted on."""
    start(rank=min(RANK, 1), world_size=SIZE)  # BUG


@failure()
def raises_before_the_others_are_ready() -> None:
    """Rank 1 raises when it has started, while the others are still in `init_process_group` or in their first call."""
    start(LONG_TIMEOUT)
    if RANK == 1:
        raise ValueError("no such model")  # BUG
    dist.barrier()


@deadlock("CollectiveMismatch", "Deadlock", "PeerFailed")
def lists_of_new_group_differ() -> None:
    """Rank 1 has another list for a new group than the others."""
    join(LONG_TIMEOUT)
    ranks = [1, 2] if RANK == 1 else [0, 1]
    group = dist.new_group(ranks, timeout=limit(LONG_TIMEOUT))  # BUG
    total = full(4, 1.0)
    if RANK in ranks:
        dist.all_reduce(total, group=group)
        expect(total, 2.0)
    dist.barrier()


@deadlock(guilty=(0, 1, 2))
def groups_are_made_in_a_cycle() -> None:
    """Each rank makes a group with the next one first, and then one with the rank before it."""
    join(LONG_TIMEOUT)
    lists = [[0, 1], [1, 2], [0, 2]]
    for ranks in (lists[RANK], lists[RANK - 1]):
        dist.new_group(ranks, timeout=limit(LONG_TIMEOUT), use_local_synchronization=True)  # BUG


@absence(is_stuck=False)
def new_group_is_left_out() -> None:
    """Rank 1 does not make a group of all ranks, and is at the next barrier."""
    join()
    if RANK != 1:
        dist.new_group(timeout=limit())
    dist.barrier()  # BUG


@absence("CollectiveTimeout", "CollectiveMismatch", "PeerFailed", ENDS_WELL, is_stuck=False, guilty_errors=None)
def new_groups_in_another_order() -> None:
    """Rank 1 makes two groups in the other order than the others."""
    join()
    lists = [[0, 1], [0, 1, 2]]
    groups = {}
    for ranks in reversed(lists) if RANK == 1 else lists:
        groups[len(ranks)] = dist.new_group(ranks, timeout=limit())  # BUG
    for size, group in groups.items():
        if size > RANK:
            total = full(4, 1.0)
            dist.all_reduce(total, group=group, async_op=True).wait()
            expect(total, float(size))


@death()
def killed_while_a_group_is_made() -> None:
    """Rank 1 is killed before it comes to a `new_group`, in which the others wait for it."""
    join(LONG_TIMEOUT)
    if RANK == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    dist.new_group(timeout=limit(LONG_TIMEOUT))
    dist.barrier()


@absence(has_line=True)
def sleeps_while_a_group_is_made() -> None:
    """Rank 1 sleeps before a `new_group`."""
    join()
    if RANK == 1:
        time.sleep(FOREVER)  # BUG
    dist.new_group(timeout=limit())
    dist.barrier()


@harmless(guilty_errors=None)
def killed_before_its_end() -> None:
    """Rank 1 is killed when all calls are done, and the others destroy the group."""
    join(LONG_TIMEOUT)
    total = full(4, 1.0)
    dist.all_reduce(total)
    expect(total, 3.0)
    dist.barrier()
    if RANK == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)  # BUG
    dist.destroy_process_group()


@harmless()
def ends_with_a_call_in_flight() -> None:
    """Rank 1 issues an asynchronous call, does not wait for it, and its program ends before the others' calls."""
    join()
    total = full(100_000, 1.0)
    if RANK != 1:
        time.sleep(0.5)
    work = dist.all_reduce(total, async_op=True)  # BUG
    if RANK != 1:
        work.wait()
        expect(total, 3.0)


@harmless()
def wait_is_forgotten() -> None:
    """Rank 0 sends a large array with `isend`, forgets to wait, and its program ends."""
    join()
    if RANK == 0:
        dist.isend(full(1_000_000, 1.0), 1)  # BUG
    elif RANK == 1:
        time.sleep(0.5)
        values = full(1_000_000, 0.0)
        dist.recv(values, 0)
        expect(values, 1.0)


@harmless()
def host_of_the_store_ends_first() -> None:
    """Rank 0, which hosts the store, ends while the others still make groups and calls."""
    join()
    if RANK != 0:  # BUG
        time.sleep(0.3)
        group = dist.new_group([1, 2], timeout=limit(), use_local_synchronization=True)
        total = full(4, 1.0)
        dist.all_reduce(total, group=group)
        expect(total, 2.0)


@harmless()
def destroy_is_forgotten_on_some_ranks() -> None:
    """Rank 0 destroys the group, the others just end."""
    join()
    dist.all_reduce(full(4, 1.0))
    if RANK == 0:  # BUG
        dist.destroy_process_group()
