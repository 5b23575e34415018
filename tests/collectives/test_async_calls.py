"""Calls with async_op=True: many outstanding, waited for in any order, by any means."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any

import numpy as np
import pytest
from collectives.contract_cases import TRANSPORTS
from collectives.playing import Report, all_right, report
from collectives.table import table
from operation_table import COLLECTIVES
from seeded_cases import Case, CasePart

import procgroup as dist
from procgroup.groups import future as future_module
from tiers import AT_LENGTH
from world import run

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def issue_all_then_wait_in_own_order(rank: int, size: int, cases: list[Case]) -> list[Report]:
    dist.init_process_group(timeout=20)
    parts = [CasePart(case, rank, size) for case in cases]
    for part in parts:
        part.start(dist, async_op=True)
    for index in np.random.default_rng(rank).permutation(len(cases)):
        parts[index].wait()
        assert parts[index].is_completed(), cases[index]
    reports = [report(part) for part in parts]
    dist.destroy_process_group()
    return reports


@transports
@pytest.mark.parametrize("size", [2, 4, 7])
def test_many_outstanding_calls_can_be_waited_for_in_any_order(transport: str, size: int) -> None:
    cells = [cell for cell in table([0] * size) if cell.case.operation in COLLECTIVES and cell.bytes < 1 << 20]
    cases = [cells[index].case for index in np.random.default_rng(size).permutation(len(cells))]
    arguments = {"args": (cases,), "timeout": 40, "environment": {"PROCGROUP_TRANSPORT": transport}}
    all_right(cases, run(issue_all_then_wait_in_own_order, size, **arguments))  # type: ignore[arg-type]


def blocking_calls_behind_async_ones(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    arrays = [np.full(1000, rank + number, np.int64) for number in range(50)]
    works: list[Any] = []
    for array in arrays:
        works.append(dist.all_reduce(array, async_op=True))
        blocking = np.ones(3)
        dist.all_reduce(blocking)
        assert (blocking == size).all()
        assert works[-1].is_completed(), "calls of one group are carried out in order"
    for number, (array, work) in enumerate(zip(arrays, works, strict=True)):
        assert work.wait()
        assert (array == sum(range(size)) + size * number).all()


@transports
def test_a_blocking_call_comes_after_the_async_ones_before_it(transport: str) -> None:
    run(blocking_calls_behind_async_ones, 3, environment={"PROCGROUP_TRANSPORT": transport})


def look_at_a_work(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    array = np.ones(4)
    if rank == 0:
        work: Any = dist.all_reduce(array, async_op=True)
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        with pytest.raises(RuntimeError, match="not completed"):
            work.result()
        future = work.get_future()
        assert not future.done()
        dist.send(np.zeros(1), 1)
    else:
        dist.recv(np.zeros(1), 0)  # so that rank 0 has looked before this rank comes
        work = dist.all_reduce(array, async_op=True)
        future = work.get_future()
    assert future.result(timeout=10)[0] is array
    assert work.wait() and work.wait(), "a work can be waited for again"
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is array
    assert (array == size).all()
    assert work.get_future().done()


@transports
def test_a_work_tells_how_far_it_is(transport: str) -> None:
    run(look_at_a_work, 2, environment={"PROCGROUP_TRANSPORT": transport})


def futures_of_many_calls(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    arrays = [np.full(2000, rank + 1.0) for _ in range(40)]
    works: list[Any] = [dist.all_reduce(array, async_op=True) for array in arrays]
    called: list[int] = []
    futures = [work.get_future() for work in works]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: called.append(number))  # type: ignore[misc]
    done, pending = wait_for_futures(futures, timeout=20)
    assert not pending and len(done) == 40
    assert [future.exception() for future in futures] == [None] * 40
    assert all((array == sum(range(1, size + 1))).all() for array in arrays)
    dist.barrier()
    deadline = time.monotonic() + 20
    while len(called) < 40 and time.monotonic() < deadline:  # a future wakes who waits for it before it calls back
        time.sleep(0.01)
    assert sorted(called) == list(range(40))


@transports
def test_futures_complete_without_anybody_waiting(transport: str) -> None:
    run(futures_of_many_calls, 3, environment={"PROCGROUP_TRANSPORT": transport})


class SlowFuture(future_module.Future):
    """A future whose making lets other threads run."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.01)


def one_future_for_all_threads(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    future_module.Future = SlowFuture  # type: ignore[misc]
    array = np.ones(4)
    if rank == 1:
        dist.recv(np.zeros(1), 0)  # so that the call still runs when the threads ask
    work: Any = dist.all_reduce(array, async_op=True)
    with ThreadPoolExecutor(4) as threads:
        futures = list(threads.map(lambda _: work.get_future(), range(4)))
    if rank == 0:
        dist.send(np.zeros(1), 1)
    assert all(one.result(timeout=10)[0] is array for one in futures)


@transports
def test_every_thread_that_asks_gets_a_future_that_completes(transport: str) -> None:
    run(one_future_for_all_threads, 2, environment={"PROCGROUP_TRANSPORT": transport})


def let_go_of_arrays_and_works(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    for number in range(100):
        dist.all_reduce(np.full(20_000, rank + number), async_op=True)  # neither the work nor the array is kept
    last = np.ones(1)
    dist.all_reduce(last)
    assert last[0] == size


@transports
def test_an_array_lives_as_long_as_the_call_that_uses_it(transport: str) -> None:
    run(let_go_of_arrays_and_works, 2, environment={"PROCGROUP_TRANSPORT": transport})


def exit_as_soon_as_done(rank: int, size: int, way: str) -> None:
    dist.init_process_group(timeout=20)
    array = np.full(2000, rank + 1)
    work: Any = dist.all_reduce(array, async_op=True)
    if way == "future":
        work.get_future().result()
    elif way == "wait":
        work.wait()
    else:
        while not work.is_completed():
            time.sleep(0.0001)
        assert work.exception() is None
    assert (array == 6).all(), f"a sum of 1, 2 and 3 came out as {array[0]}"


@transports
@pytest.mark.parametrize("way", ["future", "wait", "polling"])
def test_a_rank_may_exit_as_soon_as_its_call_is_done_and_the_others_lose_nothing(transport: str, way: str) -> None:
    for _ in range(12 if way == "future" and AT_LENGTH else 4):
        run(exit_as_soon_as_done, 3, args=(way,), environment={"PROCGROUP_TRANSPORT": transport})
