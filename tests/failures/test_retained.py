"""``retain``: a call that fails leaves the array that it reads and writes as it was, so that it can be made again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, on

import procgroup as dist
from procgroup.types import PremulSum
from world import run, start

COUNT = 1 << 21
"""Elements of float64: enough for the call to be at work when the victim dies."""

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": dist.all_reduce,
    "scan": dist.scan,
    "exscan": dist.exscan,
    "reduce": lambda array, **options: dist.reduce(array, 0, **options),
}

transports = pytest.mark.parametrize("transport", TRANSPORTS)
reductions = pytest.mark.parametrize("op", REDUCTIONS)


def values(rank: int) -> Any:
    return np.arange(COUNT, dtype=np.float64) + rank


def lose_one_in_the_middle(rank: int, size: int, op: str, async_op: bool) -> Any:
    """Make calls until rank 2 dies in the middle of one; return what the failed call left, and then make it again."""
    dist.init_process_group(timeout=20)
    dist.barrier()
    if rank == 2:
        works = [REDUCTIONS[op](values(2), retain=True, async_op=True) for _ in range(3)]
        works[1].wait()
        os.kill(os.getpid(), signal.SIGKILL)
    array = values(rank)
    while True:
        array[:] = values(rank)
        try:
            work = REDUCTIONS[op](array, retain=True, async_op=async_op)
            if async_op:
                work.wait()
        except dist.PeerLost as error:
            lost = error
            break
    is_unchanged = bool((array == values(rank)).all())
    dist.shrink_group()
    REDUCTIONS[op](array, retain=True)
    dist.destroy_process_group()
    return lost.intact, is_unchanged, array[:3].tolist()


@transports
@reductions
@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
def test_a_call_that_fails_in_the_middle_can_be_made_again(transport: str, op: str, async_op: bool) -> None:
    with start(lose_one_in_the_middle, 3, args=(op, async_op), environment=on(transport)) as world:
        outcomes = world.wait(30)
    expected = {
        "all_reduce": ([1, 3, 5], [1, 3, 5]),
        "scan": ([0, 1, 2], [1, 3, 5]),
        "exscan": ([0, 1, 2], [0, 1, 2]),
        "reduce": ([1, 3, 5], [1, 2, 3]),
    }[op]
    for rank in (0, 1):
        assert outcomes[rank].ok, outcomes[rank]
        intact, is_unchanged, result = outcomes[rank].value
        assert is_unchanged
        assert intact in ({None} if (op, rank) in {("reduce", 1)} else {True, None} if op == "exscan" else {True})
        assert result == expected[rank]


def make_all(rank: int, size: int) -> Any:
    dist.init_process_group()
    matrix = np.full((4, 6), float(rank + 1))
    dist.all_reduce(matrix[:, ::2], retain=True)  # strided
    work = dist.all_reduce(matrix[:, 1::2], dist.ReduceOp.MAX, async_op=True, retain=True)
    work.wait()
    one = np.array(float(rank + 1))  # no dimensions
    dist.scan(one, retain=True)
    nothing = np.empty(0)
    dist.all_reduce(nothing, retain=True)
    scaled = np.ones(3)
    dist.all_reduce(scaled, PremulSum(0.5), retain=True)
    alone = np.full(3, 2.0)
    dist.all_reduce(alone, group=dist.new_group([rank], use_local_synchronization=True), retain=True)
    coalesced = [np.full(3, float(rank)), np.full(5, 1.0)]
    with dist._coalescing_manager():
        dist.all_reduce(coalesced[0], retain=True)
        dist.all_reduce(coalesced[1])
    dist.destroy_process_group()
    return matrix[3].tolist(), float(one), scaled.tolist(), alone.tolist(), [each.tolist() for each in coalesced]


@transports
def test_results_are_those_of_calls_without_it(transport: str) -> None:
    first, second = run(make_all, 2, environment=on(transport))
    common = ([3.0, 2.0, 3.0, 2.0, 3.0, 2.0], [1.0] * 3, [2.0] * 3, [[1.0] * 3, [2.0] * 5])
    assert (first[0], *first[2:]) == (second[0], *second[2:]) == common
    assert (first[1], second[1]) == (1.0, 3.0)
