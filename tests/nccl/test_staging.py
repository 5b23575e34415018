"""Without a backend of its own for them, a group takes arrays on GPUs by host memory, in the order of their streams.

The GPUs are stand-ins, whose every operation is late: a wait that is missing shows as a wrong result.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from collectives.contract_cases import choose
from collectives.playing import Report, all_right, nothing_went_wrong, once, play_programs
from nccl import gpu_arrays
from nccl.gpu_arrays import LEGACY, PER_THREAD, GpuArray, comes_true, held, new_stream
from nccl.gpu_parts import case_of
from nccl.test_nccl_collectives import GPUS, expect, full, of, play_one
from operation_table import EVERY_RANK, OPERATIONS
from seeded_cases import Case

import procgroup as dist
from oracle import COMPLEX, FLOAT8, INTEGERS, is_defined
from procgroup._native import staged_bytes
from tiers import SAMPLED
from world import attempt, run

if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)

ON_GPU = [name for name in EVERY_RANK if name != "barrier"]


def what_nccl_has_not() -> list[Case]:
    """Reductions that go by host memory in a group with the backend nccl."""
    on_integers = [
        case_of("all_reduce", dtype, 50, op) for dtype, op in product(INTEGERS, ("BAND", "BXOR", "LAND", "LXOR", "AVG"))
    ]
    scans = [case_of(name, "float32", 4099, op) for name, op in product(("scan", "exscan"), ("SUM", "MAX"))]
    return [*on_integers, *scans, case_of("reduce", "int16", 70), case_of("reduce_scatter", "complex64", 9, "PRODUCT")]


def every_kind(size: int, sampled: bool) -> list[Case]:
    others = [
        case_of(name, dtype, 40, seed=number)
        for number, (name, dtype) in enumerate(product(ON_GPU, [*COMPLEX, *FLOAT8]))
        if not OPERATIONS[name].reduces or is_defined("SUM", dtype)
    ]
    uneven = [name for name in ON_GPU if OPERATIONS[name].is_uneven]
    unequal = [case_of(name, "float32", count, lengths=(0, 3, 1, 0, 17)) for name, count in product(uneven, [0, 5000])]
    return [*choose(ON_GPU, size, sampled, budget=100 if size < 4 else 40, seed=5), *others, *unequal]


Program = Callable[[int, int], None]
PROGRAMS: dict[str, Program] = {}
"""What ranks of one world do in turn, on the default group. The name of each says what must come of it."""


def program(function: Program) -> Program:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


@program
def a_call_comes_after_what_was_queued_before_it_and_keeps_its_place(rank: int, size: int) -> None:
    stream = new_stream()
    array, on_cpu = full(1000, 7, stream), np.ones(1)
    with held(stream):
        array.set(np.full(1000, float(rank)))
        late: Any = dist.all_reduce(array, async_op=True)
        behind: Any = dist.all_reduce(on_cpu, async_op=True)
        time.sleep(0.05)
        assert not late.is_completed() and not behind.is_completed() and on_cpu[0] == 1
    assert behind.wait() and on_cpu[0] == size
    assert late.wait() and (array.get() == sum(range(size))).all()


@program
def what_is_queued_after_a_call_sees_its_result_without_a_wait_of_the_host(rank: int, size: int) -> None:
    array = full(100, 1, new_stream())
    work: Any = dist.all_reduce(array, async_op=True)
    array.stream = new_stream()
    work.wait()
    assert (array.get() == size).all()


@program
def messages_of_each_kind_of_memory_meet(rank: int, size: int) -> None:
    if rank > 1:
        return
    for turn in range(8):
        on_gpu, is_async = (turn + rank) % 2 == 0, turn % 3 == 0
        values = np.arange(5.0) + turn
        array: Any = GpuArray.of(values if rank == 0 else np.zeros(5), stream=new_stream()) if on_gpu else values * 1
        if rank == 0:
            work: Any = dist.isend(array, 1, tag=turn) if is_async else dist.send(array, 1, tag=turn)
        else:
            work = dist.irecv(array, 0, tag=turn) if is_async else None
            assert is_async or dist.recv(array, None if turn % 2 else 0, tag=turn) == 0
        assert not is_async or work.wait()
        if rank == 1:
            assert ((array.get() if on_gpu else array) == values).all()


@program
def a_send_whose_stream_does_not_get_there_in_time_sends_nothing(rank: int, size: int) -> None:
    if rank == 0:
        stream = new_stream()
        array = full(3, 5, stream)
        with held(stream), pytest.raises(dist.DistBackendError, match="GPU 0 has not finished .* before the send"):
            dist.send(array, 1, timeout=0.2)
        dist.send(full(3, 6), 1)
    elif rank == 1:
        array = full(3, 0)
        dist.recv(array, 0)
        expect(array, 6, 6, 6)


@program
def ranks_may_have_their_arrays_in_either_memory(rank: int, size: int) -> None:
    array: Any = of(1, 2) if rank == 0 else np.array([1.0, 2.0])
    dist.all_reduce(array)
    assert (array.get() if rank == 0 else array).tolist() == [size, 2 * size]


@program
def factors_and_several_arrays_at_once_are_reduced(rank: int, size: int) -> None:
    array = of(2, 4)
    dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(0.5))
    expect(array, size, 2 * size)
    arrays: list[Any] = [full(count, rank, new_stream()) for count in (3, 0, 5000, 1)]
    with dist._coalescing_manager():
        for one in arrays:
            dist.all_reduce(one)
    for one in arrays:
        assert (one.get() == sum(range(size))).all()


@program
def several_arrays_that_share_memory_are_reduced_in_turn_or_refused(rank: int, size: int) -> None:
    array = full(5, 1)
    dist.all_reduce_coalesced([array, array])
    expect(array, *[size * size] * 5)
    with pytest.raises(dist.ArgumentError, match="share memory"):
        dist.all_reduce_coalesced([array, array], async_op=True)


@program
def a_barrier_waits_until_earlier_calls_have_ended_on_the_gpu(rank: int, size: int) -> None:
    array = full(100_000, 1, new_stream())
    dist.all_reduce(array)
    dist.barrier()
    array.stream = new_stream()  # which waits for nothing
    assert (array.get() == size).all()


@program
def futures_and_completed_works_have_their_results_on_the_gpu(rank: int, size: int) -> None:
    array = full(1000, 1, new_stream())
    work: Any = dist.all_reduce(array, async_op=True)
    assert work.get_future().wait()[0] is array
    array.stream = new_stream()  # which waits for nothing
    assert (array.get() == size).all()
    work = dist.all_reduce(array, async_op=True)
    assert comes_true(work.is_completed) and work.is_success()
    array.stream = new_stream()
    assert (array.get() == size * size).all()


@program
def a_call_that_is_refused_leaves_all_arrays_as_they_were(rank: int, size: int) -> None:
    group: Any = dist.new_group(list(range(size)))
    array = full(3 + rank % 2, rank)
    with pytest.raises(dist.CollectiveMismatch):
        dist.all_reduce(array, group=group)
    assert (array.get() == rank).all()
    with pytest.raises(dist.ArgumentError, match="(?i)device|cpu|cuda|gpu"):
        dist.all_gather([np.zeros(3) for _ in range(size)], full(3, 1))


@program
def many_calls_need_no_more_memory_than_those_that_run_at_once(rank: int, size: int) -> None:
    array = full(200_000, 1, new_stream())
    before = staged_bytes(0)
    for _ in range(30):
        dist.all_reduce(array, dist.ReduceOp.MAX)
    assert staged_bytes(0) - before < 6 << 21


Played = tuple[list[Report], list[Report], dict[str, str]]


def play(rank: int, size: int, cases: list[Case]) -> Played:
    gpu_arrays.start(0)
    streams = [new_stream(), LEGACY, None, new_stream(), PER_THREAD]
    dist.init_process_group("gloo", timeout=20)
    reports = [play_one(case, rank, size, streams, async_op=bool(number % 2)) for number, case in enumerate(cases)]
    became = play_programs(PROGRAMS if size > 1 else {}, rank, size)
    dist.destroy_process_group()
    dist.init_process_group("nccl", timeout=20)
    others = [play_one(case, rank, size, streams, async_op=bool(number % 2)) for number, case in enumerate(MISSED)]
    dist.destroy_process_group()
    return reports, others, became


MISSED = what_nccl_has_not()
SHARED = {**GPUS, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""All ranks use GPU 0."""


@once
def played(size: int, sampled: bool) -> list[Played]:
    return run(play, size, args=(every_kind(size, sampled),), timeout=250 if sampled else 7000, environment=SHARED)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.timeout(170 if SAMPLED else 7200)
def test_every_operation_gives_what_numpy_gives(size: int, sampled: bool) -> None:
    all_right(every_kind(size, sampled), [reports for reports, _, _ in played(size, sampled)])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.timeout(170 if SAMPLED else 7200)
def test_what_nccl_has_not_goes_by_host_memory_in_its_groups(size: int, sampled: bool) -> None:
    all_right(MISSED, [others for _, others, _ in played(size, sampled)])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.timeout(170 if SAMPLED else 7200)
def test_on_several_ranks(size: int, name: str, sampled: bool) -> None:
    nothing_went_wrong(name, [became for _, _, became in played(size, sampled)])


def use_freed_memory(rank: int, size: int) -> str:
    """Make a call whose array is freed on rank 1 before it was copied; return the error."""
    gpu_arrays.start(0)
    dist.init_process_group("gloo", timeout=20)
    stream = new_stream()
    array: Any = full(100, 1, stream)
    given = SimpleNamespace(__cuda_array_interface__=array.__cuda_array_interface__, device=0) if rank == 1 else array
    with pytest.raises(dist.DistError) as raised:
        with held(stream):
            work: Any = dist.all_reduce(given, async_op=True)
            array = None
            gpu_arrays.await_frees()
        work.wait()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_copy_that_fails_ends_the_group_on_all_ranks() -> None:
    other, own = run(use_freed_memory, 2, environment=GPUS)
    assert "CUDA" in own, own
    assert other.startswith("PeerFailed: ") and "rank 1" in other, other


def call_behind_work_that_never_ends(rank: int, size: int, is_async: bool) -> tuple[str, float]:
    gpu_arrays.start(0)
    dist.init_process_group("gloo", timeout=20)
    stream = new_stream()
    array = full(100, 1, stream)
    began = time.monotonic()
    with held(stream) if rank == 0 else contextlib.nullcontext(), pytest.raises(dist.DistError) as raised:
        work: Any = dist.all_reduce(array, async_op=is_async, timeout=0.5 if rank == 0 else 20)
        work.wait()
    return f"{type(raised.value).__name__}: {raised.value}", time.monotonic() - began


@pytest.mark.parametrize("is_async", [False, True])
def test_a_gpu_that_never_gets_to_the_call_is_named_at_the_deadline(is_async: bool) -> None:
    (own, took), (other, _) = run(call_behind_work_that_never_ends, 2, args=(is_async,), environment=GPUS)
    assert own.startswith("CollectiveTimeout: ") and "the work that was queued on its GPU before the call" in own, own
    assert other.startswith("PeerFailed: ") and "rank 0" in other, other
    assert took < 10.0, "half of the timeout of the other rank"


def die_before_the_call(rank: int, size: int) -> str:
    gpu_arrays.start(0)
    dist.init_process_group("gloo", timeout=20)
    if rank == 1:
        os._exit(9)
    with pytest.raises(dist.DistError) as raised:
        dist.all_reduce(full(100, 1))
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_lost_rank_is_named_as_on_cpu_arrays() -> None:
    survivor, _ = attempt(die_before_the_call, 2, environment=GPUS)
    assert survivor.value is not None and "PeerLost" in survivor.value and "rank 1" in survivor.value, survivor
