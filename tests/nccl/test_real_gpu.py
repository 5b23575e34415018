"""On a real GPU, backend "nccl" and staging give what NumPy gives, in the order of the streams; lost ranks are named.

All ranks use GPU 0. NCCL takes one rank of a GPU, so its groups have one rank; where PROCGROUP_TEST_NCCL names a
libnccl.so.2 of 2.30 or later, two ranks share the GPU, too ("shared nccl").

With PROCGROUP_STAND_IN_GPUS=1 in the environment the tests of the library "driver" run on the stand-ins.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from collectives.playing import Report, all_right, nothing_went_wrong, report
from mpi.test_mpi_failures import error_of
from nccl import gpu_arrays, stand_ins, test_nccl_collectives, test_nccl_failures, test_staging
from nccl.gpu_libraries import IS_STAND_IN, LIBRARIES, lacks, missing, use_real_gpus
from nccl.gpu_parts import case_of
from operation_table import EVERY_RANK, OPERATIONS
from seeded_cases import Case, CasePart

import procgroup as dist
from oracle import FLOAT8, OPS, Array, is_defined
from world import World, attempt, run, start

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

SHARED = os.environ.get("PROCGROUP_TEST_NCCL", "")
GROUPS = {"nccl": 1, "gloo": 2, **({"shared nccl": 2} if SHARED else {})}
"""How many ranks the programs have, by backend."""
MISSING = {name: lacks(name) for name in LIBRARIES}
if IS_STAND_IN and LIBRARIES["torch"].device == "cuda":  # type: ignore[attr-defined]
    MISSING["torch"] = "torch has no stand-in"
LARGE = 16 << 20
"""Elements of 64 MiB."""
ABSENT, SURVIVORS = 1, (0, 2)

libraries = pytest.mark.parametrize(
    "library",
    [pytest.param(name, marks=pytest.mark.skipif(bool(MISSING[name]), reason=MISSING[name])) for name in LIBRARIES],
)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if IS_STAND_IN:
        stand_ins.build()


def environment_of(backend: str) -> dict[str, str]:
    """Return the variables of ranks of this backend."""
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if backend == "shared nccl" else {}


def load_nccl(backend: str) -> None:
    """Load the library that lets ranks share a GPU, before torch loads another one."""
    if backend == "shared nccl":
        ctypes.CDLL(SHARED, mode=ctypes.RTLD_GLOBAL)


def join(backend: str, **how: Any) -> None:
    dist.init_process_group(backend.removeprefix("shared "), **{"timeout": 30, **how})


# --- every operation ---


class LibraryPart(CasePart):
    """One rank's part in a case, on arrays of a library."""

    library: Any

    def __init__(self, case: Case, rank: int, size: int) -> None:
        super().__init__(case, rank, size)
        self.pairs: list[tuple[Array, Any]] = []

    def wrap(self, array: Array) -> Any:
        on_gpu = self.library.of(array)
        self.pairs.append((array, on_gpu))
        return on_gpu

    def wait(self) -> None:
        super().wait()
        for array, on_gpu in self.pairs:
            array[...] = self.library.get(on_gpu)


def cases_of(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Each operation with each dtype, all_reduce with each reduce op, and three sizes: 8 B, some KiB, 1 MiB."""
    for name, dtype in product(EVERY_RANK, dtypes):
        row = OPERATIONS[name]
        if name == "barrier" or (row.reduces and dtype in FLOAT8):
            continue
        ops = [op for op in OPS if is_defined(op, dtype)] if row.reduces else ["SUM"]
        for number, op in enumerate(ops if name == "all_reduce" else ops[:1]):
            yield case_of(name, dtype, 4099, op, seed=number)
        if dtype in ("float32", "bool", "bfloat16"):
            yield case_of(name, dtype, 2)
            yield case_of(name, dtype, 1 << 18, "MAX", seed=1)
        if row.is_uneven:
            yield case_of(name, dtype, 40, lengths=(0, 3, 1, 0, 17))


def play_cases(rank: int, size: int, backend: str, name: str, cases: list[Case]) -> list[Report]:
    load_nccl(backend)
    library = LIBRARIES[name]()
    LibraryPart.library = library
    join(backend)
    streams = [library.new_stream() for _ in range(3)]
    reports = []
    for number, case in enumerate(cases):
        if case.dtype in library.unsupported:
            reports.append(("", ""))
            continue
        part = LibraryPart(case, rank, size)
        with library.using(streams[number % 3]):
            try:
                part.start(dist, bool(number % 2))
                part.wait()
            except Exception as error:
                raise AssertionError(f"rank {rank} of {size}, {case}: {type(error).__name__}: {error}") from error
        reports.append(report(part))
    dist.destroy_process_group()
    return reports


@libraries
@pytest.mark.parametrize(("backend", "size"), [*GROUPS.items(), ("gloo", 1), ("gloo", 4)])
def test_every_operation_gives_what_numpy_gives(backend: str, size: int, library: str) -> None:
    dtypes = LIBRARIES[library].dtypes or LIBRARIES["cupy"].dtypes  # type: ignore[attr-defined]
    cases = list(cases_of(dtypes))
    args = (backend, library, cases)
    all_right(cases, run(play_cases, size, args=args, timeout=80, environment=environment_of(backend)))


def play_large_arrays(rank: int, size: int, backend: str, name: str) -> dict[str, float]:
    """Move 64 MiB in each way; return the milliseconds of each call, with the wait for the GPU."""
    load_nccl(backend)
    library = LIBRARIES[name]()
    join(backend)
    block = LARGE // size
    took = {}

    def timed(what: str, call: Callable[[], Any]) -> None:
        library.synchronize()
        dist.barrier()
        began = time.perf_counter()
        call()
        library.synchronize()
        took[what] = round((time.perf_counter() - began) * 1e3, 2)

    def move() -> None:
        own = np.arange(LARGE, dtype=np.float32) % 1000 + rank
        array = library.of(own)
        timed("all_reduce", lambda: dist.all_reduce(array))
        wanted = size * (np.arange(LARGE, dtype=np.float32) % 1000) + sum(range(size))
        assert np.array_equal(library.get(array), wanted)
        array = library.of(own)
        timed("broadcast", lambda: dist.broadcast(array, size - 1))
        assert np.array_equal(library.get(array), own - rank + size - 1)
        gathered = library.of(np.zeros(LARGE, np.float32))
        timed("all_gather", lambda: dist.all_gather_single(gathered, library.of(own[:block])))
        assert np.array_equal(library.get(gathered), np.concatenate([own[:block] - rank + r for r in range(size)]))
        scattered = library.of(np.zeros(block, np.float32))
        timed("reduce_scatter", lambda: dist.reduce_scatter_single(scattered, library.of(own)))
        assert np.array_equal(library.get(scattered), wanted[rank * block : (rank + 1) * block])
        exchanged = library.of(np.zeros(LARGE, np.float32))
        timed("all_to_all", lambda: dist.all_to_all_single(exchanged, library.of(own)))
        mine = own[rank * block : (rank + 1) * block] - rank
        assert np.array_equal(library.get(exchanged), np.concatenate([mine + source for source in range(size)]))
        if size > 1:
            received = library.of(np.zeros(LARGE, np.float32))

            def ring() -> None:
                works: list[Any] = [dist.irecv(received, (rank - 1) % size)]
                works.append(dist.isend(library.of(own), (rank + 1) % size))
                for work in works:
                    work.wait()

            timed("ring", ring)
            assert np.array_equal(library.get(received), own - rank + (rank - 1) % size)

    for _ in range(2):  # the first one takes host memory, and makes communicators
        move()
    dist.destroy_process_group()
    return took


@libraries
@pytest.mark.parametrize(("backend", "size"), [*GROUPS.items(), ("gloo", 4)])
def test_large_arrays_arrive(backend: str, size: int, library: str, record_property: Any) -> None:
    args = (backend, library)
    took = run(play_large_arrays, size, args=args, timeout=80, environment=environment_of(backend))
    record_property("milliseconds", took[0])


# --- programs ---

Program = Callable[[Any, int, int], Any]
PROGRAMS: dict[str, tuple[Program, tuple[str, ...]]] = {}
"""What ranks do, each program in a world of its own, and for which backends."""


def program(*backends: str) -> Callable[[Program], Program]:
    def enter(function: Program) -> Program:
        PROGRAMS[function.__name__.replace("_", " ")] = function, backends or ("nccl", "gloo", "shared nccl")
        return function

    return enter


def total_of(size: int) -> float:
    """Return the sum of the ranks' numbers, each plus one."""
    return size * (size + 1) / 2


def zeros(library: Any, count: int = LARGE) -> Any:
    """Return an array whose making has ended on the GPU."""
    array = library.of(np.zeros(count, np.float32))
    library.synchronize()
    return array


@program()
def a_call_comes_after_the_work_on_its_stream_and_before_what_follows(library: Any, rank: int, size: int) -> None:
    for stream in (library.new_stream(), None, library.new_stream()):
        with library.using(stream) if stream is not None else contextlib.nullcontext():
            array = zeros(library)
            library.keep_busy(0.3)
            library.fill(array, rank + 1)
            dist.all_reduce(array)
            assert (library.doubled(array) == 2 * total_of(size)).all()


@program()
def wait_lets_the_stream_of_that_moment_wait(library: Any, rank: int, size: int) -> None:
    first, second = library.new_stream(), library.new_stream()
    for op, wanted in ((dist.ReduceOp.SUM, total_of(size)), (dist.ReduceOp.AVG, (size + 1) / 2)):
        with library.using(first):
            array = zeros(library)
            library.keep_busy(0.3)
            library.fill(array, rank + 1)
            work: Any = dist.all_reduce(array, op, async_op=True)
        with library.using(second):
            library.move_to_current_stream(array)
            assert work.wait()
            assert (library.doubled(array) == 2 * wanted).all()
        assert gpu_arrays.comes_true(work.is_completed) and work.is_success()


@program()
def outputs_that_nccl_writes_elsewhere_are_there_in_time(library: Any, rank: int, size: int) -> None:
    """A group of one rank does nothing in all_reduce in place: here NCCL copies."""
    stream = library.new_stream()
    with library.using(stream):
        given, gathered = zeros(library), zeros(library, LARGE * size)
        library.keep_busy(0.3)
        library.fill(given, rank + 1)
        dist.all_gather_single(gathered, given)
        wanted = np.repeat(np.arange(1, size + 1), LARGE)
        assert (library.doubled(gathered) == 2 * wanted).all()
        library.fill(gathered, 0)
        dist.all_reduce(given, dist.ReduceOp.PREMUL_SUM(0.5))
        assert (library.doubled(given) == total_of(size)).all()


@program("nccl", "shared nccl")
def the_host_does_not_wait_for_the_gpu(library: Any, rank: int, size: int) -> float:
    dist.all_reduce(zeros(library))
    array = zeros(library)
    with library.using(library.new_stream()):
        library.move_to_current_stream(array)
        dist.barrier()
        library.keep_busy(1.0)
        began = time.monotonic()
        dist.all_reduce(array)
        took = time.monotonic() - began
        library.synchronize()
    assert took < 0.5, f"the call took {took:.2f} s"
    return took


@program("gloo")
def other_work_goes_on_while_a_call_waits_for_its_stream(library: Any, rank: int, size: int) -> float:
    array = zeros(library)
    with library.using(library.new_stream()):
        library.move_to_current_stream(array)
        library.keep_busy(1.0)
        began = time.monotonic()
        work: Any = dist.all_reduce(array, async_op=True)
        took = time.monotonic() - began
        assert not work.is_completed()
        work.wait()
        library.synchronize()
    assert took < 0.5, f"the call took {took:.2f} s"
    return took


@program()
def the_memory_of_an_array_is_not_used_again_before_its_call_has_ended(library: Any, rank: int, size: int) -> None:
    for _ in range(5):
        first, second = library.new_stream(), library.new_stream()
        with library.using(first):
            given, gathered = zeros(library), zeros(library, LARGE * size)
            library.keep_busy(0.05)
            library.fill(given, rank + 1)
            work: Any = dist.all_gather_single(gathered, given, async_op=True)
            del given
            gc.collect()
        with library.using(second):
            others = [library.of(np.full(LARGE, 99, np.float32)) for _ in range(2)]
        with library.using(first):
            work.wait()
            assert (library.get(gathered) == np.repeat(np.arange(1, size + 1), LARGE)).all()
        del others


@program()
def a_barrier_and_a_future_wait_for_the_gpu(library: Any, rank: int, size: int) -> None:
    first, second = library.new_stream(), library.new_stream()
    for way in ("barrier", "future"):
        with library.using(first):
            array = zeros(library)
            library.keep_busy(0.2)
            library.fill(array, rank + 1)
            work: Any = dist.all_reduce(array, async_op=True)
            if way == "barrier":
                work.wait()
                dist.barrier()
            else:
                assert work.get_future().wait()[0] is array
        with library.using(second):
            library.move_to_current_stream(array)
            assert (library.get(array) == total_of(size)).all(), way


@program()
def objects_may_have_arrays_in_them(library: Any, rank: int, size: int) -> str:
    if not library.dtypes:
        return "not of this library"
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"array": library.of(np.full(5, rank + 1.0)), "rank": rank})
    assert [one["rank"] for one in objects] == list(range(size))
    assert all((library.get(one["array"]) == one["rank"] + 1).all() for one in objects)
    return f"{type(objects[0]['array']).__module__}.{type(objects[0]['array']).__name__}"


@program()
def abort_ends_a_call_that_waits_for_the_gpu(library: Any, rank: int, size: int) -> str:
    dist.all_reduce(zeros(library))
    array = zeros(library)
    with library.using(library.new_stream()):
        library.move_to_current_stream(array)
        dist.barrier()
        library.keep_busy(2.0)
        work: Any = dist.all_reduce(array, async_op=True)
        began = time.monotonic()
        if rank == 0:
            group: Any = dist.group.WORLD
            group.abort()
        seen = error_of(work.get_future().wait)
        assert seen.moment - began < 1.5, f"{seen} after {seen.moment - began:.2f} s"
        assert seen.kind == ("GroupBroken" if rank == 0 else "PeerFailed"), seen
        library.get(array)  # the GPU's work ends, too
    return f"{seen.kind} after {seen.moment - began:.3f} s, the GPU after {time.monotonic() - began:.2f} s"


@program()
def a_gpu_that_does_not_get_to_a_call_is_a_timeout(library: Any, rank: int, size: int) -> str:
    dist.all_reduce(zeros(library))
    array = zeros(library)
    with library.using(library.new_stream()):
        library.move_to_current_stream(array)
        dist.barrier()
        if rank == 0:
            library.keep_busy(4.0)
        began = time.monotonic()
        work: Any = dist.all_reduce(array, async_op=True, timeout=1.0 if rank == 0 else 20)
        seen = error_of(work.get_future().wait)
        took = seen.moment - began
        assert seen.kind in (("CollectiveTimeout",) if rank == 0 else ("CollectiveTimeout", "PeerFailed")), seen
        assert 0.9 < took < 2.5, f"{took:.2f} s"
        later = error_of(lambda: dist.all_reduce(array))
        assert later.kind == "GroupBroken", later
        library.get(array)
    return f"{seen.kind} after {took:.3f} s: {seen.text}; the GPU after {time.monotonic() - began:.2f} s"


@program("nccl")
def the_communicator_can_be_made_with_the_group(library: Any, rank: int, size: int) -> str:
    dist.destroy_process_group()
    began = time.monotonic()
    dist.init_process_group("nccl", device_id=0, timeout=30, pg_options={"min_ctas": 1, "max_ctas": 4})
    took = time.monotonic() - began
    array = library.of(np.full(3, 2.0))
    dist.all_reduce(array)
    assert (library.get(array) == 2).all() and dist.get_backend() == "nccl"
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=30)
    dist.all_reduce(array)
    dist.all_reduce(np.ones(2))
    return f"init_process_group with device_id took {took:.2f} s"


def play_program(rank: int, size: int, backend: str, library: str, name: str) -> Any:
    load_nccl(backend)
    made = LIBRARIES[library]()
    join(backend)
    value = PROGRAMS[name][0](made, rank, size)
    began = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began < 6, "destroy_process_group takes too long"
    return value


@libraries
@pytest.mark.parametrize(
    ("backend", "name"),
    [(backend, name) for name, (_, backends) in PROGRAMS.items() for backend in GROUPS if backend in backends],
)
def test_program(backend: str, library: str, name: str, record_property: Any) -> None:
    args = (backend, library, name)
    values = run(play_program, GROUPS[backend], args=args, timeout=60, environment=environment_of(backend))
    if values[0] is not None:
        record_property("values", values)


# --- lost and late ranks, over staging ---


def stream_arrays(rank: int, size: int, name: str) -> SimpleNamespace:
    """Reduce 16 MiB without end."""
    library = LIBRARIES[name]()
    join("gloo")
    array = library.of(np.ones(4 << 20, np.float32))

    def reduce_without_end() -> None:
        while True:
            dist.all_reduce(array, dist.ReduceOp.MAX)
            print(".", end="", flush=True)

    return error_of(reduce_without_end)


def wait_for_a_rank(rank: int, size: int, name: str) -> SimpleNamespace:
    library = LIBRARIES[name]()
    join("gloo")
    array = library.of(np.ones(1000, np.float32))
    dist.all_reduce(array)
    if rank == ABSENT:
        time.sleep(60)
    print("...", flush=True)
    return error_of(lambda: dist.all_reduce(array))


def kill_and_wait(world: World) -> tuple[float, list[Any], float]:
    """Kill the absent rank amid a call of the others; return when, the outcomes, and after how long all had ended."""
    for rank in SURVIVORS:
        world.wait_for_output(rank, "...", timeout=50)
    time.sleep(0.3)
    killed = time.monotonic()
    world.kill(ABSENT)
    outcomes = world.wait(20)
    return killed, outcomes, time.monotonic() - killed


@libraries
@pytest.mark.parametrize("function", [stream_arrays, wait_for_a_rank], ids=["amid transfers", "while they wait"])
def test_a_killed_rank_is_named_within_a_second(library: str, function: Any, record_property: Any) -> None:
    with start(function, 3, args=(library,)) as world:
        killed, outcomes, ended = kill_and_wait(world)
    seen = [outcomes[rank] for rank in SURVIVORS]
    assert all(one.value is not None for one in seen), seen
    took = [round(one.value.moment - killed, 3) for one in seen]
    record_property("seconds", {"until PeerLost": took, "until all ended": round(ended, 2)})
    for one in seen:
        assert (one.value.kind, one.value.peer) == ("PeerLost", ABSENT), one.value
        assert "rank 1" in one.value.text and one.exit_code == 0, one
    assert max(took) < 1.0 and ended < 6.0, (took, ended)


def time_out(rank: int, size: int, name: str, ended: Path) -> SimpleNamespace | None:
    library = LIBRARIES[name]()
    join("gloo")
    array = library.of(np.ones(1000, np.float32))
    dist.all_reduce(array)
    dist.barrier()
    if rank == ABSENT:
        deadline = time.monotonic() + 30
        while not ended.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return None
    seen = error_of(lambda: dist.all_reduce(array, timeout=1.0))
    ended.touch()
    return seen


@libraries
def test_a_rank_that_sleeps_is_named_at_the_deadline(library: str, tmp_path: Path, record_property: Any) -> None:
    seen = run(time_out, 2, args=(library, tmp_path / "ended"), timeout=60)[0]
    record_property("error", f"{seen.kind} after {seen.took:.3f} s: {seen.text}")
    assert (seen.kind, seen.missing) == ("CollectiveTimeout", (ABSENT,)), seen
    assert 0.99 < seen.took < 2.0, seen.took


# --- two ranks on the GPU, with the NCCL that is installed ---


def share_the_gpu(rank: int, size: int) -> str:
    library = LIBRARIES["driver"]()
    try:
        dist.init_process_group("nccl", timeout=20, device_id=0)
        dist.all_reduce(library.of(np.full(1000, rank + 1.0)))
    except dist.DistBackendError as error:
        return str(error)
    return "not refused"


def test_two_ranks_on_one_gpu_are_refused_with_the_variable_that_allows_it() -> None:
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}
    for outcome in attempt(share_the_gpu, 2, environment=variables, timeout=60):
        assert "NCCL_MULTI_RANK_GPU_ENABLE" in (outcome.value or ""), outcome


# --- the tests of the stand-ins, on the real libraries ---


def on_gpu_0() -> None:
    """Let the tests of the stand-ins use real GPUs, the first one on all ranks."""
    use_real_gpus()
    begin = gpu_arrays.start
    gpu_arrays.start = lambda gpu=None: begin(0)


def play_staging(rank: int, size: int, cases: list[Case]) -> test_staging.Played:
    on_gpu_0()
    return test_staging.play(rank, size, cases)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_tests_of_staging_pass(size: int) -> None:
    cases = test_staging.every_kind(size, True)
    played = run(play_staging, size, args=(cases,), timeout=80, environment={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    all_right(cases, [reports for reports, _, _ in played])
    all_right(test_staging.MISSED, [others for _, others, _ in played])
    if size > 1:
        wrong = ""
        for name in test_staging.PROGRAMS:
            try:
                nothing_went_wrong(name, [became for _, _, became in played])
            except AssertionError as error:
                wrong += f"{name}: {error}\n"
        assert not wrong, wrong


def call_behind_work_that_never_ends(rank: int, size: int, is_async: bool) -> tuple[str, float]:
    on_gpu_0()
    return test_staging.call_behind_work_that_never_ends(rank, size, is_async)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_gpu_that_never_gets_to_the_call_is_named_at_the_deadline(is_async: bool) -> None:
    (own, took), (other, _) = run(call_behind_work_that_never_ends, 2, args=(is_async,), timeout=60)
    assert own.startswith("CollectiveTimeout: ") and "the work that was queued on its GPU before the call" in own, own
    assert other.startswith("PeerFailed: ") and "rank 0" in other, other
    assert took < 2.5, took


NEEDS_MORE_GPUS = ("arrays of one call on two devices are refused before anything is sent",)


def play_nccl(rank: int, size: int, cases_of_kind: dict[str, list[Case]]) -> test_nccl_collectives.Played:
    load_nccl("shared nccl" if size > 1 else "nccl")
    on_gpu_0()
    for name in NEEDS_MORE_GPUS:
        test_nccl_collectives.PROGRAMS.pop(name)
    return test_nccl_collectives.play(rank, size, cases_of_kind)


@pytest.mark.parametrize("size", [1, *((2, 4) if SHARED else ())])
def test_the_tests_of_nccl_pass(size: int) -> None:
    cases = {kind: make(size, True) for kind, make in test_nccl_collectives.KINDS.items()}
    played = run(play_nccl, size, args=(cases,), timeout=80, environment={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    for kind in cases:
        all_right(cases[kind], [reports[kind] for reports, _ in played])
    if size > 1:
        wrong = ""
        for name in test_nccl_collectives.PROGRAMS:
            if name in NEEDS_MORE_GPUS:
                continue
            try:
                nothing_went_wrong(name, [became for _, became in played])
            except AssertionError as error:
                wrong += f"{name}: {error}\n"
        assert not wrong, wrong


def leave_work_behind(rank: int, size: int) -> None:
    load_nccl("shared nccl")
    on_gpu_0()
    test_nccl_failures.leave_work_behind(rank, size)


@pytest.mark.skipif(not SHARED, reason="needs two ranks of NCCL on one GPU")
def test_a_program_that_never_destroys_its_groups_ends_in_silence() -> None:
    for outcome in attempt(leave_work_behind, 2, environment=environment_of("shared nccl"), timeout=60):
        assert outcome.ok, outcome
        test_nccl_failures.expect_quiet(outcome)


# --- JAX ---


def use_jax(rank: int, size: int) -> str:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp

    from procgroup import functional

    device = jax.devices()[0]
    dist.init_process_group(timeout=60)
    for dtype in ("float32", "float16", "bfloat16", "int32", "bool", "complex64"):
        array = jnp.arange(4000).reshape(size, -1).astype(dtype)
        wanted = np.asarray(array)
        op = dist.ReduceOp.MAX if dtype == "bool" else dist.ReduceOp.SUM
        given = array if dtype in ("bool", "complex64") else array % 3
        summed = functional.all_reduce(given, op)
        assert summed.dtype == array.dtype and summed.devices() == {device}, (summed.dtype, summed.devices())
        assert np.array_equal(np.asarray(summed), np.asarray(given) * (1 if dtype == "bool" else size)), dtype
        gathered = functional.all_gather(array)
        assert all(np.array_equal(np.asarray(one), wanted) for one in gathered), dtype
        from_last = functional.broadcast(array if rank == size - 1 else jnp.zeros_like(array), size - 1)
        assert np.array_equal(np.asarray(from_last), wanted), dtype
        exchanged = functional.sendrecv(array, (rank + 1) % size, (rank - 1) % size)
        assert np.array_equal(np.asarray(exchanged), wanted), dtype
    large = functional.all_reduce(jnp.full(LARGE, rank + 1.0))
    assert (np.asarray(large) == total_of(size)).all()
    received = np.zeros(5, np.float32)
    if rank == 0:
        dist.send(jnp.arange(5, dtype=jnp.float32), 1)  # a JAX array may be read
    else:
        dist.recv(received, 0)
        assert received.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(dist.ArgumentError, match="immutable"):
        dist.all_reduce(jnp.ones(3))

    @jax.jit
    def loss(x: Any) -> Any:
        return (rank + 1) * jnp.sum(functional.all_reduce(x * x, dist.ReduceOp.AVG))

    with functional.jit_errors():
        x = jnp.full(3, rank + 1.0)
        value = float(loss(x))
        mean = sum((other + 1) ** 2 for other in range(size)) / size
        assert value == pytest.approx((rank + 1) * 3 * mean)
        gradient = np.asarray(jax.grad(loss)(x))
        assert gradient.tolist() == pytest.approx([2 * (rank + 1) * total_of(size) / size] * 3)
    dist.destroy_process_group()
    return f"jax {jax.__version__} on {device.platform} {device}"


@pytest.mark.skipif(bool(lacks("jax")), reason="JAX is not installed")
def test_functions_take_and_return_jax_arrays_outside_and_inside_of_jit(record_property: Any) -> None:
    record_property("where", run(use_jax, 2, timeout=80)[0])
