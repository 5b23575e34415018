"""The barrier that names who did not come."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.testing import RanksFailed, run_ranks
from world import placed

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


@transports
@pytest.mark.parametrize("size", [1, 2, 4])
def test_everybody_comes(size: int, transport: str) -> None:
    def meet() -> None:
        for _ in range(3):
            dist.monitored_barrier()
            dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)

    run_ranks(meet, size, **placed(transport, size))


@transports
@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_every_rank_is_told_all_who_are_missing(wait_all_ranks: bool, transport: str) -> None:
    told = threading.Barrier(4)

    def meet_without_two() -> Any:
        if dist.get_rank() in (1, 3):
            told.wait(30)
            # Too late: what the others announced is still there, but they are gone by the next call.
            with pytest.raises(dist.OperationError):
                dist.monitored_barrier(timeout=20)
                dist.monitored_barrier(timeout=20)
            return None
        # One deadline passes long before the other.
        timeout = 0.5 if dist.get_rank() == 0 else 20
        with pytest.raises(dist.CollectiveTimeout) as caught:
            dist.monitored_barrier(timeout=timeout, wait_all_ranks=wait_all_ranks)
        told.wait(30)
        return caught.value

    errors = run_ranks(meet_without_two, 4, **placed(transport, 4))
    for rank in (0, 2):
        # Rank 0 may have been alone when its time had passed.
        assert {1, 3} <= set(errors[rank].missing) <= {1, 2, 3}
        assert errors[rank].op == "monitored_barrier"
        text = str(errors[rank])
        assert text.startswith(f"monitored_barrier #1 on group 0 (rank {rank} of 4): not complete after 0.5 s")
    assert errors[0].missing == errors[2].missing


@transports
@pytest.mark.parametrize("barrier", ["barrier", "monitored_barrier"])
def test_a_call_that_gave_up_before_its_turn_ends_a_later_barrier_at_once(barrier: str, transport: str) -> None:
    gave_up, told = threading.Event(), threading.Barrier(3)

    def call_in_a_row() -> Any:
        rank = dist.get_rank()
        if rank == 2:
            gave_up.wait(30)
        work = dist.all_reduce(np.ones(1), async_op=True)
        if rank == 0:
            call: Any = dist.monitored_barrier if barrier == "monitored_barrier" else dist.group.WORLD.barrier  # type: ignore[union-attr]
            with pytest.raises(dist.CollectiveTimeout) as late:
                call(timeout=0.3)
            gave_up.set()
        assert work.wait()
        if rank == 0:
            told.wait(30)
            return late.value
        begin = time.monotonic()
        with pytest.raises(dist.CollectiveTimeout) as caught:
            dist.monitored_barrier(timeout=20)
        assert time.monotonic() - begin < 10, "long before its own deadline"
        told.wait(30)
        return caught.value

    for error in run_ranks(call_in_a_row, 3, **placed(transport, 3)):
        assert 2 in error.missing and error.seconds == 0.3


def test_a_rank_that_left_is_lost_at_once() -> None:
    def leave_or_meet() -> None:
        if dist.get_rank() != 1:
            dist.monitored_barrier()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(leave_or_meet, 2)
    error = caught.value.errors[0]
    assert isinstance(error, dist.PeerLost) and error.peer == 1


def test_a_rank_outside_the_group_is_warned() -> None:
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.warns(UserWarning, match="monitored_barrier"):
        dist.monitored_barrier(outside)
