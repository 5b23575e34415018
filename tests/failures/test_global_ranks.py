"""Errors on a group of some ranks name global ranks, and group ranks where those are others; on all ranks once."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import ROOTED, TRANSPORTS, on

import procgroup as dist
from procgroup.testing import run_ranks
from world import placed, start

transports = pytest.mark.parametrize("transport", TRANSPORTS)

ODD = [1, 3]


def error_of(call: Any) -> Any:
    with pytest.raises(dist.DistError) as caught:
        call()
    return caught.value


def fail_in_a_subgroup() -> Any:
    rank = dist.get_rank()
    mismatched, late, objects = dist.new_group(ODD), dist.new_group([1, 2, 3]), dist.new_group(ODD)
    if rank == 2:
        dist.recv(np.ones(1), 1)
    if rank not in ODD:
        return None
    mismatch = error_of(lambda: dist.broadcast(np.ones(ROOTED + rank), 3, group=mismatched))
    if rank == 3:
        with pytest.raises(TypeError):
            dist.all_gather_object([None, None], Unpicklable(), group=objects)
        return error_of(lambda: dist.all_reduce(np.ones(4), group=late, timeout=20))
    pickling = error_of(lambda: dist.all_gather_object([None, None], 1, group=objects))
    timeout = error_of(lambda: dist.all_reduce(np.ones(4), group=late, timeout=1.0))
    dist.send(np.ones(1), 2)
    return mismatch, timeout, pickling


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not this")


@transports
def test_errors_name_global_ranks(transport: str) -> None:
    for _ in range(3):  # a rank that does not get to run does not answer over TCP in the 0.3 s that it is given
        results = run_ranks(fail_in_a_subgroup, 4, **placed(transport, 4))
        mismatch, timeout, pickling = results[1]
        if transport == "shm" or "not answering" not in str(timeout):
            break
    line = mismatch.lines[0]
    assert re.fullmatch(r"test_global_ranks\.py:\d+", line) and mismatch.lines == {0: line, 1: line}
    assert str(mismatch).startswith(
        "broadcast #1 on group 1 (rank 0 of 2; global rank 1): the ranks made different calls: this rank called "
        f"broadcast of 10001 float64 from rank 3 (rank 1 of the group) at {line}, rank 3 (rank 1 of group 1) called "
        f"broadcast of 10003 float64 from rank 3 (rank 1 of the group) at {line}. "
    ), mismatch
    assert (mismatch.rank, mismatch.global_rank, mismatch.members, set(mismatch.calls)) == (0, 1, (1, 3), {0, 1})
    awaited = (
        "still waiting for rank 2 (rank 1 of group 2): rank 2 (rank 1 of group 2) is in recv of 1 float64 from rank 1"
    )
    assert awaited in str(timeout)
    assert (timeout.missing, timeout.global_missing, timeout.intact) == ((1,), (2,), True)
    assert "rank 3 (rank 1 of group 3) could not pickle its object" in str(pickling)
    assert (pickling.source, pickling.global_source) == (1, 3)
    failed = results[3]
    limit = "its time limit of 1 s passed while it waited for rank 2 (rank 1 of the group)"
    assert f"rank 1 (rank 0 of group 2) failed: {limit}" in str(failed)
    assert str(failed).endswith("Look at rank 1's own error for the cause."), failed
    assert (failed.peer, failed.global_peer, failed.intact) == (0, 1, True)


def fail_in_the_world() -> str:
    return str(error_of(lambda: dist.all_reduce(np.ones(4 + dist.get_rank()))))


def test_on_the_default_group_nothing_is_said_twice() -> None:
    first, second = run_ranks(fail_in_the_world, 2)
    assert re.match(
        r"all_reduce #1 on group 0 \(rank 0 of 2\): the ranks made different calls: this rank called "
        r"all_reduce\(SUM\) of 4 float64 at (\S+), rank 1 called all_reduce\(SUM\) of 5 float64 at \1\. ",
        first,
    )
    assert "global rank" not in first + second and "of the group" not in first + second


def lose_the_last(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=30)
    odd: Any = dist.new_group(ODD)
    dist.barrier()
    if rank == 3:
        dist.recv(np.zeros(1), 1)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 1:
        return None
    work: Any = dist.irecv(np.zeros(10), 3, group=odd)
    dist.send(np.zeros(1), 3)
    lost = [error_of(work.wait), error_of(lambda: dist.barrier(group=odd))]
    return [(error.peer, error.global_peer, error.intact, str(error)) for error in lost]


@transports
def test_a_lost_rank_is_named_by_both_ranks(transport: str) -> None:
    with start(lose_the_last, 4, environment=on(transport)) as world:
        received, barrier = world.wait(20)[1].value
    for error in (received, barrier):
        assert error[:2] == (1, 3) and "lost rank 3 (rank 1 of group 1) (pid " in error[3], error
    assert received[2] is True and "No array was changed" in received[3]
    assert barrier[2] is None and "array" not in barrier[3], "a barrier has none"
