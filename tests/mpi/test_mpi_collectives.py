"""Under mpiexec, backend "mpi" gives what the built-in transport gives: the contract of the collectives, and the rest.

One world for each MPI and number of ranks plays all cases, and then the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from collectives.contract_cases import choose
from collectives.playing import Report, all_right, nothing_went_wrong, play_one, play_programs
from collectives.test_factors_and_complex import SIZE as SIZE_OF_FACTORS
from collectives.test_factors_and_complex import scale_and_add
from collectives.test_identical_bits import COUNTS, OPS, judge, wild_values
from collectives.test_rank_order import what_differs
from groups.test_objects import play_all_calls
from operation_table import EVERY_RANK, OPERATIONS
from seeded_cases import Case

import procgroup as dist
from layouts import LAYOUTS
from mpi_world import BACKEND, MPIS, lacks, run
from oracle import COMPLEX, FLOAT8, FLOATS, digest, is_defined, numpy_dtype
from tiers import SAMPLED
from world import WorldFailed

pytestmark = pytest.mark.timeout(120 if SAMPLED else 7200)

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

PROGRAMS: dict[str, Callable[[int, int], None]] = {}
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
def messages_of_one_tag_arrive_in_order_and_tags_do_not_wait_for_each_other(rank: int, size: int) -> None:
    tags = [0, 1, 7, 1000, (1 << 31) + 5, (1 << 63) - 1]
    if rank == 0:
        works: list[Any] = [dist.isend(np.array([tag, turn]), 1, tag=tag) for turn in range(20) for tag in tags]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag, turn in product(reversed(tags), range(20)):
            received = np.zeros(2, np.int64)
            assert dist.recv(received, 0, tag=tag) == 0
            assert received.tolist() == [tag, turn]


@program
def receives_of_one_tag_are_matched_in_the_order_of_their_issue(rank: int, size: int) -> None:
    if rank == 0:
        for turn in range(30):
            dist.send(np.full(turn, turn), 1)
    elif rank == 1:
        arrays = [np.zeros(turn, np.int64) for turn in range(30)]
        works: list[Any] = [dist.irecv(array, 0) for array in arrays]
        for work in reversed(works):
            work.wait()
        assert all((array == turn).all() for turn, array in enumerate(arrays))


@program
def a_receive_from_any_rank_takes_each_message_once_and_names_its_sender(rank: int, size: int) -> None:
    turns = 20
    if rank:
        for turn in range(2 * turns):
            dist.send(np.array([rank, turn]), 0, tag=3)
        return
    received = [np.zeros(2, np.int64) for _ in range(2 * turns * (size - 1))]
    half = turns * (size - 1)
    sources = [dist.recv(array, tag=3) for array in received[:half]]
    works: list[Any] = [dist.irecv(array, tag=3) for array in received[half:]]
    for work in works:
        work.wait()
    sources += [work.source_rank() for work in works]
    assert sources == [array[0] for array in received]
    for source in range(1, size):
        assert [array[1] for array in received if array[0] == source] == list(range(2 * turns))


@program
def large_messages_between_all_ranks_pass_each_other(rank: int, size: int) -> None:
    peers = [peer for peer in range(size) if peer != rank]
    sent = {peer: np.full(LARGE // 8, rank * 100 + peer) for peer in peers}
    received = {peer: np.zeros(LARGE // 8, np.int64) for peer in peers}
    works: list[Any] = [dist.isend(array, peer, tag=1) for peer, array in sent.items()]
    works += [dist.irecv(array, peer, tag=1) for peer, array in reversed(received.items())]
    for work in works:
        work.wait()
    assert all((array == peer * 100 + rank).all() for peer, array in received.items())


@program
def an_array_may_be_changed_as_soon_as_send_returns(rank: int, size: int) -> None:
    for count in (10, 100_000):
        array = np.zeros(count)
        for turn in range(30):
            if rank == 0:
                array[:] = turn
                dist.send(array, 1)
                array[:] = -1
            elif rank == 1:
                dist.recv(array, 0)
                assert (array == turn).all()


@program
def small_sends_need_no_receive_to_be_waiting(rank: int, size: int) -> None:
    if rank == 0:
        for turn in range(20):
            dist.send(np.full(16, turn), 1)
    dist.barrier()
    if rank == 1:
        for turn in range(20):
            received = np.zeros(16, np.int64)
            dist.recv(received, 0)
            assert (received == turn).all()


@program
def batches_go_round_in_rings_whatever_their_order(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for count, turn in product((0, 1, 100_003), range(2)):
        received = [np.zeros(count, np.int64) for _ in range(3)]
        ops = [dist.P2POp(dist.isend, np.full(count, 10 * rank + number), after) for number in range(3)]
        ops += [dist.P2POp(dist.irecv, array, before) for array in received]
        for work in dist.batch_isend_irecv(ops[turn * 3 :] + ops[: turn * 3]):
            assert work.wait()
        assert all((array == 10 * before + number).all() for number, array in enumerate(received))


@program
def messages_and_collectives_do_not_disturb_each_other(rank: int, size: int) -> None:
    for turn in range(30):
        total, received = np.array([1]), np.zeros(3, np.int64)
        works: list[Any] = [dist.all_reduce(total, async_op=True), dist.irecv(received, (rank - 1) % size)]
        dist.send(np.full(3, turn), (rank + 1) % size)
        for work in works:
            work.wait()
        assert total[0] == size and (received == turn).all()


@program
def overlapping_groups_keep_their_data_apart(rank: int, size: int) -> None:
    for members in ([0, 1], [1, size - 1, 0], list(range(size))[::-1]):
        members = list(dict.fromkeys(members))
        group: Any = dist.new_group(members, sort_ranks=False)
        if rank not in members:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert dist.get_rank(group) == members.index(rank)
        for count in (1, 700, 100_000):
            array = np.full(count, rank + 1)
            dist.all_reduce(array, group=group)
            assert (array == sum(members) + len(members)).all()
        outputs = [np.zeros(1, np.int64) for _ in members]
        dist.all_gather(outputs, np.array([rank]), group=group)
        assert [int(output[0]) for output in outputs] == members
        array = np.array([rank])
        dist.broadcast(array, src=members[-1], group=group)
        assert array[0] == members[-1]
        if rank == members[0]:
            dist.send(np.array([7.0]), members[-1], group=group)
        elif rank == members[-1]:
            received = np.zeros(1)
            assert dist.recv(received, group=group) == members[0] and received[0] == 7


@program
def async_works_of_several_groups_can_be_waited_for_in_any_order(rank: int, size: int) -> None:
    groups: list[Any] = [dist.new_group(list(range(size))) for _ in range(3)]
    issued = []
    for number in np.random.default_rng(rank).permutation(3):  # groups come in another order on each rank
        for turn in range(10):
            array = np.full(10 ** (turn % 6), rank + number, np.int64)
            issued.append((array, number, dist.all_reduce(array, group=groups[number], async_op=True)))
    for place in np.random.default_rng(rank + 9).permutation(len(issued)):
        array, number, work = issued[place]
        assert work is not None and work.wait() and work.is_completed()
        assert (array == sum(range(size)) + size * number).all()
    for group in groups:
        dist.destroy_process_group(group)


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
def coalesced_calls_do_what_single_ones_do(rank: int, size: int) -> None:
    sums = [np.full(4 + place, rank + place, np.int64) for place in range(3)]
    with dist._coalescing_manager():
        for array in sums:
            dist.all_reduce(array)
    assert all((array == sum(range(size)) + size * place).all() for place, array in enumerate(sums))
    gathered = [np.zeros(size * 2) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in gathered:
            dist.all_gather_single(output, np.full(2, float(rank)))
    manager.wait()
    assert all((output == np.repeat(np.arange(size), 2)).all() for output in gathered)
    scattered = np.zeros(2)
    with dist._coalescing_manager():
        dist.reduce_scatter_single(scattered, np.arange(2.0 * size))
    assert scattered.tolist() == [2.0 * rank * size, (2.0 * rank + 1) * size]


@program
def objects_arrive_as_they_were(rank: int, size: int) -> None:
    play_all_calls()


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


@cache
def world_of(mpi: str, size: int, sampled: bool) -> list[Played] | WorldFailed:
    try:
        return run(play, size, mpi=mpi, args=(cases_of(size, sampled),), timeout=100 if sampled else 7000)
    except WorldFailed as error:
        return error


def played(mpi: str, size: int, sampled: bool) -> list[Played]:
    results = world_of(mpi, size, sampled)
    if isinstance(results, WorldFailed):
        raise results
    return results


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
