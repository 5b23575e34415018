"""Under mpiexec, backend "mpi" gives what the built-in transport gives: the contract of the collectives, and the rest.

One world for each MPI and number of ranks plays all cases, and then the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
from collectives.backend_programs import HOST, HOST_MESSAGES, MESSAGES, OTHERS, for_arrays
from collectives.contract_cases import choose
from collectives.playing import Report, all_right, nothing_went_wrong, once, play_one, play_programs
from collectives.test_factors_and_complex import SIZE as SIZE_OF_FACTORS
from collectives.test_factors_and_complex import scale_and_add
from collectives.test_identical_bits import COUNTS, OPS, judge, wild_values
from collectives.test_rank_order import what_differs
from operation_table import EVERY_RANK, OPERATIONS
from seeded_cases import Case

import procgroup as dist
from layouts import LAYOUTS
from mpi_world import BACKEND, MPIS, lacks, run
from oracle import COMPLEX, FLOAT8, FLOATS, digest, is_defined, numpy_dtype
from tiers import SAMPLED

pytestmark = pytest.mark.timeout(300 if SAMPLED else 7200)

mpis = pytest.mark.parametrize(
    "mpi", [pytest.param(mpi, marks=pytest.mark.skipif(bool(lacks(mpi)), reason=lacks(mpi))) for mpi in MPIS]
)

LARGE = 8 << 20
"""Bytes of an array with the blocks of all ranks: more than any MPI sends eagerly."""


def other_dtypes() -> Iterator[Case]:
    for number, (name, dtype) in enumerate(product(EVERY_RANK, [*COMPLEX, *FLOAT8])):
        for op in ("SUM", "AVG", "PRODUCT") if OPERATIONS[name].reduces else ("SUM",):
            if not OPERATIONS[name].reduces or is_defined(op, dtype):
                yield Case(name, dtype, 40 * number, op, seed=number)


def uneven_blocks() -> Iterator[Case]:
    uneven = [name for name, row in OPERATIONS.items() if row.is_uneven]
    for number, (name, dtype, count) in enumerate(product(uneven, ["int16", "float32", "bfloat16"], [0, 1, 70_000])):
        yield Case(name, dtype, count, lengths=(0, 3, 1, 0, 17), seed=number)


def strided_arrays() -> Iterator[Case]:
    layouts = tuple(LAYOUTS)
    for number, (name, count) in enumerate(product(EVERY_RANK, [1, 5, 4096, 70_000])):
        for turn in (number, number + len(layouts) // 2):
            first = turn % len(layouts)
            yield Case(name, "float32", count, layouts=layouts[first:] + layouts[:first], seed=number)


def large_arrays(size: int) -> Iterator[Case]:
    """Each twice, because every other case is asynchronous."""
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "ring"):
        blocks = 1 if name in ("all_reduce", "broadcast", "ring") else size
        yield from [Case(name, "float32", LARGE // 4 // blocks, root=size - 1)] * 2


KINDS: dict[str, Callable[[int, bool], list[Case]]] = {
    "every operation, dtype and op": lambda size, sampled: choose(EVERY_RANK, size, sampled, budget=70, seed=2),
    "complex numbers and float8": lambda size, sampled: list(other_dtypes()),
    "blocks of unequal sizes": lambda size, sampled: list(uneven_blocks()),
    "arrays that are not contiguous": lambda size, sampled: list(strided_arrays()),
    "large arrays": lambda size, sampled: list(large_arrays(size)),
}

PROGRAMS: dict[str, Callable[[int, int], None]] = for_arrays(HOST, MESSAGES, HOST_MESSAGES, OTHERS)
"""What ranks of one world do in turn, on the default group. The name of each says what must come of it."""


def program(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


@program
def groups_have_the_name_of_their_backend(rank: int, size: int) -> None:
    half = dist.new_group([0, 1])
    assert dist.get_backend() == BACKEND
    assert dist.get_backend_config().startswith(f"cpu:{BACKEND}")
    if rank < 2:
        assert dist.get_backend(half) == BACKEND


@program
def threads_use_groups_of_their_own_at_once(rank: int, size: int) -> None:
    groups: list[Any] = [dist.new_group(list(range(size))) for _ in range(3)]

    def add(group: Any) -> None:
        for turn in range(30):
            array = np.full(5000, rank + turn, np.int64)
            dist.all_reduce(array, group=group)
            assert (array == sum(range(size)) + size * turn).all()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(add, groups))


@program
def a_work_has_a_future_that_completes_without_a_wait(rank: int, size: int) -> None:
    arrays = [np.full(2000, rank + 1.0) for _ in range(20)]
    works: list[Any] = [dist.all_reduce(array, async_op=True) for array in arrays]
    for work, array in zip(works, arrays, strict=True):
        assert work.get_future().result(timeout=10)[0] is array
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert (array == size * (size + 1) / 2).all()


@program
def each_rank_has_a_factor_of_its_own(rank: int, size: int) -> None:
    if size == SIZE_OF_FACTORS:
        for dtype in ("bfloat16", "float64", "complex64"):
            scale_and_add(dtype)


@program
def all_ranks_get_the_same_bits_near_the_true_result(rank: int, size: int) -> None:
    for dtype, op, count in product(FLOATS, OPS, COUNTS):
        array = wild_values(dtype, count, rank).copy()
        dist.all_reduce(array, op)
        if count < 5000:
            assert not (wrong := judge(op, dtype, count, size, array)), f"{op.name} of {count} {dtype}: {wrong}"
        digests: list[Any] = [None] * size
        dist.all_gather_object(digests, digest(array))
        assert len(set(digests)) == 1, f"{op.name} of {count} {dtype}"


@program
def nans_have_the_same_bits_on_all_ranks(rank: int, size: int) -> None:
    """Of MIN and MAX, which are operations of our own: MPI leaves open which NaN a sum or product of NaNs is."""
    for dtype, op, count in product(FLOATS, (dist.ReduceOp.MIN, dist.ReduceOp.MAX), (1, 16, 128, 512, 4099, 140_001)):
        array = np.full(count, np.nan, numpy_dtype(dtype))
        array.view(f"u{array.itemsize}")[:] |= rank + 1
        dist.all_reduce(array, op)
        digests: list[Any] = [None] * size
        dist.all_gather_object(digests, digest(array))
        assert len(set(digests)) == 1, f"{op.name} of {count} {dtype}"


@program
def a_group_can_be_made_again_and_promise_rank_order(rank: int, size: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group(BACKEND, timeout=20, deterministic="order")
    assert what_differs(rank, size) == []


Played = tuple[dict[str, list[Report]], dict[str, str]]
"""What one rank reports of the cases of each kind, and what went wrong in the programs: "" where nothing did."""


def play(rank: int, size: int, cases_of: dict[str, list[Case]]) -> Played:
    dist.init_process_group(BACKEND, timeout=20)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    reports = {
        kind: [play_one(case, rank, size, async_op=bool(number % 2)) for number, case in enumerate(cases)]
        for kind, cases in cases_of.items()
    }
    became = play_programs(PROGRAMS if size > 1 else {}, rank, size)
    dist.destroy_process_group()
    return reports, became


def cases_of(size: int, sampled: bool) -> dict[str, list[Case]]:
    return {kind: make(size, sampled) for kind, make in KINDS.items()}


@once
def played(mpi: str, size: int, sampled: bool) -> list[Played]:
    return run(play, size, mpi=mpi, args=(cases_of(size, sampled),), timeout=250 if sampled else 7000)


@mpis
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_case_gives_what_numpy_gives(mpi: str, size: int, kind: str, sampled: bool) -> None:
    all_right(KINDS[kind](size, sampled), [reports[kind] for reports, _ in played(mpi, size, sampled)])


@mpis
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_several_ranks(mpi: str, size: int, name: str, sampled: bool) -> None:
    nothing_went_wrong(name, [became for _, became in played(mpi, size, sampled)])
