"""What every task keeps that moves the bytes of calls (native/ops/task.hpp), whoever implements it.

The same programs run on each of them: MPI; NCCL, behind gates and where the ranks agree first; copies between a GPU and
host memory; and a generator of Python. The GPUs and NCCL are stand-ins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import ABSENT, allowance
from groups.toy_backend import StoreBackend
from mpi.test_mpi_failures import error_of
from nccl import gpu_arrays, stand_ins
from nccl.gpu_arrays import GpuArray

import mpi_world
import procgroup as dist
import world

SIZE = 3
COUNT = 5000
"""Elements of an array: more than MPI's calls leave to the engine."""
LIMIT = 0.7
"""Seconds of calls that are to time out."""


@dataclass(frozen=True)
class Implementation:
    """A task, and the groups and arrays whose calls it makes."""

    name: str
    backend: str
    is_on_gpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    raises_later: bool = False
    """Whether a blocking call has returned before the ranks have agreed: the next call raises its error."""

    def lack(self) -> str:
        return gpu_arrays.MISSING if self.is_on_gpu else mpi_world.lacks("mpich") if self.backend == "mpi" else ""

    def join(self, **how: Any) -> None:
        if self.is_on_gpu:
            gpu_arrays.start()
        if self.backend == "toy":
            dist.Backend.register_backend("toy", StoreBackend)
        dist.init_process_group(self.backend, **how)

    def array(self, values: Any) -> Any:
        made = np.broadcast_to(np.asarray(values, np.float64), COUNT).copy()
        return GpuArray.of(made) if self.is_on_gpu else made

    def values(self, array: Any) -> np.ndarray:
        return np.asarray(array.get() if self.is_on_gpu else array)

    def error_of(self, call: Callable[[], Any], group: Any = None) -> SimpleNamespace:
        """Return the error of a call, which may be left to the group's next one."""

        def call_and_another() -> None:
            call()
            if self.raises_later:
                dist.barrier(group)

        return error_of(call_and_another)

    def start(self, program: Any, *args: Any) -> Any:
        args = (self.name, *args)
        if self.backend == "mpi":
            return mpi_world.start(program, SIZE, mpi="mpich", args=args)
        return world.start(program, SIZE, args=args, environment=self.environment)

    def run(self, program: Any, *args: Any) -> list[Any]:
        args = (self.name, *args)
        if self.backend == "mpi":
            return mpi_world.run(program, SIZE, mpi="mpich", args=args)
        return world.run(program, SIZE, args=args, environment=self.environment)


GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}
IMPLEMENTATIONS = {
    one.name: one
    for one in (
        Implementation("MPI", "mpi"),
        Implementation("NCCL behind gates", "nccl", True, GPUS, raises_later=True),
        Implementation("NCCL where ranks agree first", "nccl", True, {**GPUS, "PROCGROUP_NCCL_GATE": "0"}),
        Implementation("staging", "gloo", True, GPUS),
        Implementation("a generator of Python", "toy"),
    )
}


@pytest.fixture(params=IMPLEMENTATIONS)
def task(request: pytest.FixtureRequest) -> Implementation:
    chosen = IMPLEMENTATIONS[request.param]
    if chosen.lack():
        pytest.skip(chosen.lack())
    if chosen.is_on_gpu:
        stand_ins.build()  # before the deadlines of the worlds begin
    return chosen


def make_each_call(rank: int, size: int, name: str, is_async: bool) -> None:
    task = IMPLEMENTATIONS[name]
    task.join()
    total = size * (size + 1) / 2
    is_root = rank == 1
    for _ in range(2):  # NCCL's first call agrees first
        mine, single = task.array(rank + 1), task.array(-1)
        blocks = [task.array(10 * rank + peer) for peer in range(size)]
        taken = [task.array(-1) for _ in range(size)]
        reduced = sum(10 * peer + rank for peer in range(size))
        calls: list[tuple[Callable[..., Any], Any, float]] = [
            (partial(dist.all_reduce, mine), mine, total),
            (partial(dist.broadcast, mine, 1), mine, total),
            (partial(dist.all_gather, taken, mine), taken[2], total),
            (partial(dist.reduce, mine, 1), mine, size * total if is_root else total),
            (partial(dist.scatter, single, blocks if is_root else None, 1), single, 10 + rank),
            (partial(dist.gather, single, taken if is_root else None, 1), taken[0], 10 if is_root else total),
            (partial(dist.all_to_all, taken, blocks), taken[2], 20 + rank),
            (partial(dist.reduce_scatter, single, blocks), single, reduced),
        ]
        for number, (call, result, expected) in enumerate(calls):
            work = call(async_op=is_async)
            assert (work is not None) == is_async
            if is_async:
                assert work.wait()
            found = task.values(result)
            assert (found == expected).all(), f"call {number}: {found[:3]} instead of {expected}"
    dist.destroy_process_group()


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asynchronous"])
def test_calls_give_what_the_operations_say(task: Implementation, is_async: bool) -> None:
    task.run(make_each_call, is_async)


def send_in_a_ring(rank: int, size: int, name: str) -> None:
    task = IMPLEMENTATIONS[name]
    task.join()
    for number in range(3):
        received = task.array(-1)
        sending: Any = dist.isend(task.array(rank + number), (rank + 1) % size)  # whose array nobody else keeps
        receiving: Any = dist.irecv(received, (rank - 1) % size)
        receiving.wait()
        sending.wait()
        assert (task.values(received) == (rank - 1) % size + number).all()
    dist.destroy_process_group()


def test_messages_arrive_and_their_arrays_are_kept(task: Implementation) -> None:
    task.run(send_in_a_ring)


def go_on_beside(rank: int, size: int, name: str) -> None:
    task = IMPLEMENTATIONS[name]
    task.join()
    first, second = dist.group.WORLD, dist.new_group(list(range(size)))
    for group in (first, second):
        dist.all_reduce(task.array(1), group=group)
    other = task.array(1)
    waiting: Any = None
    late = task.array(1)
    if rank != ABSENT:
        waiting = dist.all_reduce(late, group=first, async_op=True)
    work: Any = dist.all_reduce(other, group=second, async_op=True)
    assert work.wait()
    if rank == ABSENT:
        waiting = dist.all_reduce(late, group=first, async_op=True)
    assert waiting.wait()
    assert (task.values(other) == size).all() and (task.values(late) == size).all()
    dist.destroy_process_group()


def test_a_call_that_waits_does_not_keep_another_group_from_its_calls(task: Implementation) -> None:
    task.run(go_on_beside)


def differ(rank: int, size: int, name: str) -> SimpleNamespace:
    task = IMPLEMENTATIONS[name]
    task.join(timeout=30)
    dist.all_reduce(task.array(1))
    array = task.array(7)
    seen = task.error_of(lambda: dist.broadcast(array, 0) if rank == ABSENT else dist.all_reduce(array))
    assert (task.values(array) == 7).all()
    seen.later = error_of(lambda: dist.all_reduce(task.array(1))).kind
    dist.destroy_process_group()
    return seen


def test_a_call_on_which_the_ranks_disagree_is_named_and_changes_no_array(task: Implementation) -> None:
    for seen in task.run(differ):
        assert (seen.kind, seen.later) == ("CollectiveMismatch", "GroupBroken"), seen
        assert "broadcast" in seen.calls[ABSENT] and "all_reduce" in seen.calls[0]


def wait_for_a_rank(rank: int, size: int, name: str, seconds: float) -> SimpleNamespace | None:
    task = IMPLEMENTATIONS[name]
    task.join(timeout=60)
    dist.all_reduce(task.array(1))
    group = dist.new_group(list(range(size)))
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(task.array(1), group=group)
    group.set_timeout(seconds)
    if rank == ABSENT:
        print("ready", flush=True)
        time.sleep(3 * LIMIT if seconds == LIMIT else 60)
        return None
    work: Any = dist.all_reduce(task.array(1), group=group, async_op=True)
    print("ready", flush=True)
    seen = error_of(lambda: work.wait())
    began = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began < allowance(5.0)
    return seen


def test_a_rank_that_does_not_come_is_named_at_the_deadline(task: Implementation) -> None:
    with task.start(wait_for_a_rank, LIMIT) as ranks:
        outcomes = ranks.wait(60)
    for rank in (0, 2):
        seen = outcomes[rank].value
        assert seen is not None, f"{outcomes[rank].output}{outcomes[rank].traceback}"
        assert seen.kind in ("CollectiveTimeout", "PeerFailed"), seen  # the other's deadline may come first
        assert seen.kind == "PeerFailed" or list(seen.missing) == [ABSENT], seen
        assert seen.took < allowance(LIMIT + 2)


def test_a_rank_that_is_killed_is_named_at_once(task: Implementation) -> None:
    with task.start(wait_for_a_rank, 60.0) as ranks:
        for rank in range(SIZE):
            ranks.wait_for_output(rank, "ready")
        killed = time.monotonic()
        ranks.kill(ABSENT)
        outcomes = ranks.wait(60)
    for rank in (0, 2):
        seen = outcomes[rank].value
        assert seen is not None, f"{outcomes[rank].output}{outcomes[rank].traceback}"
        assert (seen.kind, seen.peer) == ("PeerLost", ABSENT), seen
        assert seen.moment - killed < allowance(3.0)
