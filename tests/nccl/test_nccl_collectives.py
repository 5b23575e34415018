"""Backend "nccl" gives on GPU arrays what the built-in transport gives on CPU arrays, in the order of their streams.

The GPUs and NCCL are stand-ins. One world for each number of ranks plays all cases, and then the programs.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest
from collectives.backend_programs import MESSAGES, OTHERS, Arrays, for_arrays
from collectives.playing import Report, all_right, nothing_went_wrong, once, play_programs, report
from collectives.test_factors_and_complex import FACTORS, Reduction
from nccl import gpu_arrays
from nccl.gpu_arrays import LEGACY, PER_THREAD, GpuArray, comes_true, held, is_idle, new_stream
from nccl.gpu_parts import GpuPart, OnGpu, case_of, choose, unequal_blocks
from seeded_cases import Case

import procgroup as dist
from oracle import DTYPES, FLOATS, OPS, Array, is_defined, numpy_dtype
from tiers import SAMPLED
from world import run

if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)


pytestmark = pytest.mark.timeout(170 if SAMPLED else 7200)

GPUS = {"PROCGROUP_STAND_IN_GPUS": "4", "PROCGROUP_STAND_IN_DELAY_US": "100"}
"""So late that a wait which is missing shows as a wrong result."""

KINDS: dict[str, Callable[[int, bool], list[Case]]] = {
    "every operation, dtype and op": choose,
    "blocks of unequal sizes": lambda size, sampled: list(unequal_blocks()),
}

ARRAYS = Arrays(
    GpuArray.of, lambda elements: GpuArray.of(elements, stream=new_stream()), GpuArray.get, turns=5, large=100_000
)
PROGRAMS: dict[str, Callable[[int, int], None]] = for_arrays(ARRAYS, MESSAGES, OTHERS)
"""What ranks of one world do in turn, on the default group. The name of each says what must come of it."""


def program(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def of(*elements: float, stream: int | None = LEGACY) -> GpuArray:
    return GpuArray.of(np.array(elements, np.float64), stream=stream)


def full(count: int, value: float, stream: int | None = LEGACY) -> GpuArray:
    return GpuArray.of(np.full(count, value, np.float64), stream=stream)


def expect(array: GpuArray, *elements: float) -> None:
    assert array.get().tolist() == list(elements)


# --- names, devices, refusals ---


@program
def groups_have_the_name_of_their_backend(rank: int, size: int) -> None:
    assert dist.get_backend() == "nccl"
    assert dist.get_backend_config() == "cuda:nccl"
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert (dist.get_backend(pair), dist.get_backend_config(pair)) == ("nccl", "cuda:nccl")


@program
def arrays_on_the_cpu_objects_and_arrays_on_the_gpu_take_turns(rank: int, size: int) -> None:
    for turn in range(10):
        on_cpu, on_gpu = np.full(5, turn + rank), full(5, turn + rank)
        work: Any = dist.all_reduce(on_gpu, async_op=turn % 2 == 1)
        dist.all_reduce(on_cpu)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {rank: turn})
        dist.barrier()
        assert work is None or work.wait()
        assert objects == [{peer: turn} for peer in range(size)]
        assert (on_cpu == on_gpu.get()).all() and on_cpu[0] == size * turn + sum(range(size))


@program
def arrays_of_one_call_on_two_devices_are_refused_before_anything_is_sent(rank: int, size: int) -> None:
    if rank == 0:
        outputs: list[Any] = [full(3, 7) for _ in range(size)]
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_gather([*outputs[1:], np.zeros(3)], of(1, 2, 3)),
            lambda: dist.all_gather(outputs, np.zeros(3)),
            lambda: dist.all_to_all_single(full(size, 7), np.zeros(size)),
            lambda: dist.reduce_scatter(np.zeros(3), outputs),
            lambda: dist.all_gather(outputs, GpuArray.of(np.zeros(3), device=3)),
        ]
        for call in calls:
            with pytest.raises(dist.ArgumentError, match="(?i)device|cpu|cuda|gpu"):
                call()
        for output in outputs:
            expect(output, 7, 7, 7)
    total = of(1)
    dist.all_reduce(total)
    expect(total, size)


@program
def arrays_that_are_not_contiguous_are_refused_before_anything_is_sent(rank: int, size: int) -> None:
    if rank == 0:
        flat, matrix = full(6, 7), GpuArray.of(np.full((2, 3), 7.0))
        combine: list[Callable[..., Any]] = [dist.all_reduce, lambda array: dist.broadcast(array, 0)]
        move: list[Callable[..., Any]] = [
            lambda array: dist.send(array, 1),
            lambda array: dist.irecv(array, 1),
            lambda array: dist.all_gather([full(array.size, 0) for _ in range(size)], array),
        ]
        for array, calls in ((flat.strided(), combine + move), (matrix.transposed(), move)):
            for call in calls:
                with pytest.raises(dist.ArgumentError, match="contiguous"):
                    call(array)
        assert (flat.get() == 7).all() and (matrix.get() == 7).all()
    dist.barrier()


@program
def arrays_in_another_order_are_reduced_and_broadcast_where_all_ranks_have_it(rank: int, size: int) -> None:
    matrix = GpuArray.of(np.arange(6.0).reshape(2, 3) + rank)
    turned = matrix.transposed()
    dist.all_reduce(turned)
    assert (matrix.get() == size * np.arange(6.0).reshape(2, 3) + sum(range(size))).all()
    dist.reduce(turned, 0)
    matrix.set(np.full((2, 3), rank + 3.0))
    dist.broadcast(turned, size - 1)
    assert (matrix.get() == size + 2).all()


@program
def arrays_that_may_not_be_written_are_refused_where_the_call_writes(rank: int, size: int) -> None:
    array = of(rank)
    if rank == 0:
        output = full(size, 7).readonly()
        for call in (
            lambda: dist.all_reduce(array.readonly()),
            lambda: dist.broadcast(array.readonly(), 1),
            lambda: dist.recv(array.readonly(), 1),
            lambda: dist.all_gather_single(output, array),
        ):
            with pytest.raises(dist.ArgumentError, match="(?i)read-?only|writ"):
                call()
        expect(output, *[7] * size)
    received = of(7)
    dist.broadcast(array.readonly() if rank == 0 else received, 0)
    expect(received, 7 if rank == 0 else 0)


@program
def reductions_that_are_not_defined_are_refused_by_name(rank: int, size: int) -> None:
    if rank == 0:
        for dtype, op in product(DTYPES, OPS):
            if is_defined(op, dtype):
                continue
            array = GpuArray.of(np.ones(3, numpy_dtype(dtype)))
            with pytest.raises(Exception, match=f"{dtype}|{op}"):
                dist.all_reduce(array, getattr(dist.ReduceOp, op))
            assert (array.get() == np.ones(3, numpy_dtype(dtype))).all()
    total = of(1)
    dist.all_reduce(total)
    expect(total, size)


def scaled_sum(inputs: Sequence[Array]) -> Array:
    wide = np.float32 if inputs[0].itemsize == 2 else inputs[0].dtype
    factors = [np.asarray(factor, wide) for factor in FACTORS]
    scaled = [array.astype(wide) * factor for array, factor in zip(inputs, factors, strict=False)]
    return np.asarray(reduce(np.add, scaled)).astype(inputs[0].dtype)


class GpuReduction(OnGpu, Reduction):
    """A reduction with a factor of each rank, on GPU arrays."""


@program
def each_rank_has_a_factor_of_its_own(rank: int, size: int) -> None:
    for dtype, name, count in product(FLOATS, ("all_reduce", "reduce", "reduce_scatter"), (1, 5000)):
        op = dist.ReduceOp.PREMUL_SUM(float(FACTORS[rank]))
        part = GpuReduction(name, rank, size, root=size - 1, op=op, count=count, dtype=dtype)
        part.reduced = scaled_sum
        part.start(dist, async_op=count == 1)
        part.wait()
        assert not part.wrong(), f"{name} of {count} {dtype}: {part.wrong()}"


@program
def the_names_of_torch_for_single_arrays_mean_the_same(rank: int, size: int) -> None:
    gathered, scattered = full(2 * size, 0), full(2, 0)
    dist.all_gather_into_tensor(gathered, full(2, rank))
    expect(gathered, *np.repeat(np.arange(size), 2))
    dist.reduce_scatter_tensor(scattered, GpuArray.of(np.arange(2.0 * size)))
    expect(scattered, 2.0 * rank * size, (2.0 * rank + 1) * size)


@program
def blocks_may_be_side_by_side_on_one_rank_and_apart_on_the_others(rank: int, size: int) -> None:
    for owner in range(size):
        whole = full(3 * size, -1)
        outputs = whole.parts(size) if rank == owner else [full(3, -1) for _ in range(size)]
        dist.all_gather(outputs, full(3, rank))
        for source, output in enumerate(outputs):
            expect(output, source, source, source)
        whole = GpuArray.of(np.repeat(np.arange(float(size)), 3))
        inputs = whole.parts(size) if rank == owner else [full(3, target) for target in range(size)]
        output = full(3, -1)
        dist.reduce_scatter(output, inputs)
        expect(output, *[size * rank] * 3)


@program
def torch_is_not_imported_for_the_arrays_of_other_libraries(rank: int, size: int) -> None:
    assert "torch" not in sys.modules


# --- streams ---


@program
def a_blocking_call_begins_after_what_is_queued_on_the_stream_and_the_host_does_not_wait(rank: int, size: int) -> None:
    for stream in (new_stream(), LEGACY, PER_THREAD):
        array = full(1000, -1, stream)
        array.get()
        with held(stream):
            array.set(np.full(1000, rank + 1.0))
            dist.all_reduce(array)
            assert not is_idle(stream)
        assert (array.get() == size * (size + 1) / 2).all()


@program
def a_call_is_recorded_as_queued_until_the_gpu_has_finished_it(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD

    def state() -> str:
        return str(group.records()[-1]["state"])

    array = full(1000, 1, stream := new_stream())
    dist.all_reduce(array)  # connects the ranks
    with held(stream):
        dist.all_reduce(array)
        assert comes_true(lambda: state() == "queued"), state()
    assert comes_true(lambda: state() == "completed"), state()


@program
def each_array_of_a_call_is_used_on_its_own_stream(rank: int, size: int) -> None:
    for late in range(size + 1):
        streams = [new_stream() for _ in range(size + 1)]
        outputs = [full(50, -1, stream) for stream in streams[:-1]]
        array = full(50, -1, streams[-1])
        with held(streams[late]):
            array.set(np.full(50, rank))
            dist.all_gather(outputs, array)
            assert not is_idle(streams[late])
        for source, output in enumerate(outputs):
            assert (output.get() == source).all()


@program
def wait_lets_the_stream_of_that_moment_wait_and_not_the_host(rank: int, size: int) -> None:
    first, second = new_stream(), new_stream()
    array = full(100, -1, first)
    with held(first):
        array.set(np.full(100, 1.0))
        work: Any = dist.all_reduce(array, async_op=True)
        array.stream = second
        assert work.wait()
        assert not is_idle(second)  # what follows on it comes after the call
    assert (array.get() == size).all()


@program
def a_work_is_completed_when_the_gpu_has_finished(rank: int, size: int) -> None:
    stream = new_stream()
    array = full(100, 1, stream)
    with held(stream):
        array.set(np.full(100, 1.0))
        work: Any = dist.all_reduce(array, async_op=True)
        future = work.get_future()
        work.wait()
        dist.all_reduce(np.zeros(1))  # the host goes on; a barrier would wait for the GPU
        assert not work.is_completed() and not future.done() and work.exception() is None
    assert future.result(timeout=10)[0] is array
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert (array.get() == size).all()


@program
def a_work_is_completed_as_soon_as_the_host_has_waited_for_the_gpu(rank: int, size: int) -> None:
    """Also while another thread of the library looks."""
    array = full(4, 0, new_stream())
    for _ in range(300):
        work: Any = dist.all_reduce(array, async_op=True)
        work.wait()
        gpu_arrays.synchronize()
        assert work.is_completed()


@program
def a_work_completes_without_a_wait(rank: int, size: int) -> None:
    arrays = [full(2000, rank + 1.0, new_stream()) for _ in range(20)]
    works: list[Any] = [dist.all_reduce(array, async_op=True) for array in arrays]
    for work, array in zip(works, arrays, strict=True):
        if array is arrays[-1]:
            assert work.get_future().result(timeout=10)[0] is array
        assert comes_true(work.is_completed) and work.is_success()
        array.stream = None  # the GPU has finished
        assert (array.get() == size * (size + 1) / 2).all()


@program
def an_array_without_a_stream_needs_no_synchronisation_before_a_call(rank: int, size: int) -> None:
    for async_op in (False, True):
        array = full(100, rank, None)
        work: Any = dist.all_reduce(array, async_op=async_op)
        if work is not None:
            assert work.wait() and comes_true(work.is_completed)
        assert (array.get() == sum(range(size))).all()  # waits for the GPU


@program
def calls_of_one_group_follow_each_other_on_whatever_streams(rank: int, size: int) -> None:
    early, late = new_stream(), new_stream()
    first, second = full(100, 1, late), full(100, 5, early)
    with held(late):
        dist.all_reduce(first)
        work: Any = dist.all_reduce(second, async_op=True)
    assert work.wait()
    assert (first.get() == size).all() and (second.get() == 5 * size).all()


@program
def an_array_is_kept_until_the_gpu_has_finished(rank: int, size: int) -> None:
    stream = new_stream()
    array, result = full(1000, rank, stream), full(1000 * size, -1, stream)
    seen = weakref.ref(array)
    with held(stream):
        work: Any = dist.all_gather_single(result, array, async_op=rank == 0)
        sent: Any = dist.isend(full(10, 3, stream), 1) if rank == 0 else None
        received = full(10, 0, stream)
        if rank == 1:
            sent = dist.irecv(received, 0)
        if sent is not None:
            sent.wait()
        if work is not None:
            work.wait()
        del array, work, sent
        gc.collect()
        assert seen() is not None
    assert (result.get() == np.repeat(np.arange(size), 1000)).all()
    if rank == 1:
        assert (received.get() == 3).all()
    is_freed = comes_true(lambda: seen() is None, 2.0)
    dist.barrier()  # at the latest
    assert is_freed or comes_true(lambda: seen() is None, 2.0)


@program
def works_and_arrays_that_nobody_keeps_do_their_work(rank: int, size: int) -> None:
    for turn in range(20):
        dist.all_reduce(full(20_000, turn), async_op=True)
        total = full(3, turn)
        dist.all_reduce(total)
        expect(total, *[turn * size] * 3)


# --- messages ---


@program
def what_is_queued_after_a_send_may_change_the_array(rank: int, size: int) -> None:
    array = full(5000, -1, new_stream())
    for turn in range(10):
        if rank == 0:
            array.set(np.full(5000, float(turn)))
            dist.send(array, 1)
            array.set(np.full(5000, -1.0))
        elif rank == 1:
            dist.recv(array, 0)
            assert (array.get() == turn).all()


@program
def a_message_passes_a_collective_that_waits_on_the_gpu(rank: int, size: int) -> None:
    stream, other = new_stream(), new_stream()
    total = full(10, 1, stream)
    with held(stream):
        dist.all_reduce(total)
        if rank < 2:
            array = full(10, 7 if rank == 0 else -1, other)
            work: Any = dist.isend(array, 1) if rank == 0 else dist.irecv(array, 0)
            work.wait()
            assert (array.get() == 7).all() and not is_idle(stream)
        dist.all_reduce(np.zeros(1))
    assert (total.get() == size).all()


@program
def a_message_between_two_ranks_needs_no_other_rank(rank: int, size: int) -> None:
    group: Any = dist.new_group(list(range(size)))
    if rank == size - 1:
        dist.send(of(1, 2, 3), 0, group=group)
    elif rank == 0:
        received = of(0, 0, 0)
        assert dist.recv(received, size - 1, group=group) == size - 1
        expect(received, 1, 2, 3)


# --- coalescing, groups, threads, objects ---


@program
def a_list_of_arrays_is_reduced_as_one_call(rank: int, size: int) -> None:
    for async_op in (False, True):
        counts = [0, 1, 5000, 7]
        arrays = [GpuArray.of(np.full(count, rank + count, np.float32), stream=new_stream()) for count in counts]
        future: Any = dist.all_reduce_coalesced(arrays, async_op=async_op)
        if future is not None:
            future.wait()
        wanted = [sum(range(size)) + size * count for count in counts]
        assert all((array.get() == value).all() for array, value in zip(arrays, wanted, strict=True))


@program
def a_group_is_split_into_groups_with_communicators_of_their_own(rank: int, size: int) -> None:
    half = size // 2
    part: Any = dist.split_group(split_ranks=[list(range(half)), list(range(half, size))])
    array = of(rank)
    dist.all_reduce(array, group=part)
    expect(array, sum(range(half)) if rank < half else sum(range(half, size)))
    alone: Any = dist.split_group(split_ranks=[[0]])
    assert (alone is None) == (rank > 0)
    if alone is not None:
        array = of(5)
        dist.all_reduce(array, group=alone)
        expect(array, 5)


@program
def a_call_of_one_group_passes_a_call_of_another_that_waits_on_the_gpu(rank: int, size: int) -> None:
    group: Any = dist.new_group(list(range(size)))
    stream, other = new_stream(), new_stream()
    late, early = full(100, 1, stream), full(100, 2, other)
    with held(stream):
        dist.all_reduce(late)
        dist.all_reduce(early, group=group)
        assert (early.get() == 2 * size).all() and not is_idle(stream)
        dist.all_reduce(np.zeros(1))
    assert (late.get() == size).all()


@program
def threads_use_groups_of_their_own_at_once(rank: int, size: int) -> None:
    groups: list[Any] = [dist.new_group(list(range(size))) for _ in range(3)]

    def add(group: Any) -> None:
        stream = new_stream()
        for turn in range(10):
            array = full(5000, rank + turn, stream if turn % 2 else PER_THREAD)
            dist.all_reduce(array, group=group)
            assert (array.get() == sum(range(size)) + size * turn).all()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add, groups))


@program
def a_group_of_two_backends_uses_each_for_its_kind_of_arrays(rank: int, size: int) -> None:
    for backend, config in (("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"), (None, None)):
        dist.destroy_process_group()
        dist.init_process_group(backend, timeout=20)
        if config is not None:
            assert dist.get_backend_config() == config
        on_cpu, on_gpu = np.array([1.0]), of(1)
        dist.all_reduce(on_cpu)
        dist.all_reduce(on_gpu)
        dist.barrier()
        assert on_cpu[0] == size
        expect(on_gpu, size)


Played = tuple[dict[str, list[Report]], dict[str, str]]
"""What one rank reports of the cases of each kind, and what went wrong in the programs: "" where nothing did."""


def play_one(case: Case, rank: int, size: int, streams: Sequence[int | None], async_op: bool) -> Report:
    part = GpuPart(case, rank, size)
    part.streams = streams
    try:
        part.start(dist, async_op)
        part.wait()
    except Exception as error:
        raise AssertionError(f"rank {rank} of {size}, {case}: {type(error).__name__}: {error}") from error
    return report(part)


def play(rank: int, size: int, cases_of: dict[str, list[Case]]) -> Played:
    gpu_arrays.start()
    streams = [new_stream(), LEGACY, None, new_stream(), PER_THREAD]
    dist.init_process_group("nccl", timeout=20)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    reports = {
        kind: [play_one(case, rank, size, streams, async_op=bool(number % 2)) for number, case in enumerate(cases)]
        for kind, cases in cases_of.items()
    }
    became = play_programs(PROGRAMS if size > 1 else {}, rank, size)
    dist.destroy_process_group()
    return reports, became


@once
def played(size: int, sampled: bool) -> list[Played]:
    cases_of = {kind: make(size, sampled) for kind, make in KINDS.items()}
    return run(play, size, args=(cases_of,), timeout=250 if sampled else 7000, environment=GPUS)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_case_gives_what_numpy_gives(size: int, kind: str, sampled: bool) -> None:
    all_right(KINDS[kind](size, sampled), [reports[kind] for reports, _ in played(size, sampled)])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_several_ranks(size: int, name: str, sampled: bool) -> None:
    nothing_went_wrong(name, [became for _, became in played(size, sampled)])


def play_large_arrays(rank: int, size: int) -> list[Report]:
    gpu_arrays.start()
    dist.init_process_group("nccl", timeout=20)
    names = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "ring")
    streams = [new_stream()]
    return [play_one(case_of(name, "float32", 300_000), rank, size, streams, async_op=False) for name in names]


def test_large_arrays_give_what_numpy_gives() -> None:
    for reports in run(play_large_arrays, 2, environment=GPUS):
        assert not any(wrong for wrong, _ in reports), reports
