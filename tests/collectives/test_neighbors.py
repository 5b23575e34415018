"""neighbor_all_to_all: halos of meshes of any shape, compared with those that NumPy's roll gives of the whole array."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup import _native
from procgroup.testing import run_ranks
from world import placed, run

Array = np.ndarray[Any, np.dtype[Any]]
Sizes = Callable[[int, int], int]
"""The number of elements that a rank gives to one side."""

LIMITS = _native.schedule_limits()
SHAPES = [
    (1,),
    (1, 1),
    (2,),
    (2, 1),
    (1, 2),
    (3,),
    (4,),
    (2, 2),
    (1, 4),
    (6,),
    (2, 3),
    (3, 1, 2),
    (8,),
    (2, 2, 2),
    (4, 2),
]
MANY = LIMITS["chunk"] // 4
"""Of float64: twice what a slot holds."""

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


def equal(rank: int, side: int) -> int:
    return 5


def uneven(rank: int, side: int) -> int:
    return (7 * rank + 3 * side) % 5


def large(rank: int, side: int) -> int:
    return MANY + 1000 * rank + 10 * side


def one_large(rank: int, side: int) -> int:
    return 3 * MANY if (rank, side) == (1, 0) else 2


def elements(rank: int, side: int, count: int) -> Array:
    return 1_000_000.0 * rank + 100_000.0 * side + np.arange(count)


def neighbors(shape: tuple[int, ...], periodic: tuple[bool, ...], rank: int) -> list[int]:
    """Return the ranks at all sides by NumPy: -1 for none."""
    mesh = np.arange(math.prod(shape)).reshape(shape)
    place = np.unravel_index(rank, shape)
    found = []
    for axis, (extent, is_ring) in enumerate(zip(shape, periodic, strict=True)):
        for step in (1, -1):  # the negative direction first: roll by 1 brings the rank before
            is_border = place[axis] == (0 if step == 1 else extent - 1)
            found.append(-1 if is_border and not is_ring else int(np.roll(mesh, step, axis)[place]))
    return found


def exchange(shape: tuple[int, ...], periodic: tuple[bool, ...], sizes: Sizes, async_op: bool, **how: Any) -> None:
    """Make the call, and compare every array with what it must hold."""
    rank = dist.get_rank()
    beside = neighbors(shape, periodic, rank)
    inputs = [elements(rank, side, sizes(rank, side)) for side in range(len(beside))]
    # What the rank on one side sends in this rank's direction.
    wanted = [
        np.full(3, -1.0) if peer < 0 else elements(peer, side ^ 1, sizes(peer, side ^ 1))
        for side, peer in enumerate(beside)
    ]
    outputs = [np.full(len(array), -1.0) for array in wanted]
    work = dist.neighbor_all_to_all(outputs, inputs, shape, periodic, async_op=async_op, **how)
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
    for side, (output, array) in enumerate(zip(outputs, wanted, strict=True)):
        assert np.array_equal(output, array), f"rank {rank} of {shape}, {periodic}, side {side}: {output} != {array}"
    for side, array in enumerate(inputs):
        assert np.array_equal(array, elements(rank, side, sizes(rank, side))), "an input has changed"


def exchange_all(shapes: list[tuple[int, ...]], sizes: list[Sizes]) -> None:
    for number, (shape, size) in enumerate(itertools.product(shapes, sizes)):
        for periodic in itertools.product((False, True), repeat=len(shape)):
            exchange(shape, periodic, size, async_op=number % 2 == 1)


@transports
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_every_side_gets_what_its_neighbour_sends_there(size: int, transport: str) -> None:
    shapes = [shape for shape in SHAPES if math.prod(shape) == size]
    run_ranks(exchange_all, size, shapes, [equal, uneven], **placed(transport, size))


@transports
@pytest.mark.parametrize("size", [2, 3, 4])
def test_large_halos_too(size: int, transport: str) -> None:
    shapes = [shape for shape in SHAPES if math.prod(shape) == size]
    run_ranks(exchange_all, size, shapes, [large, one_large], **placed(transport, size))


def processes(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    exchange_all([shape for shape in SHAPES if math.prod(shape) == size], [equal, uneven, large])
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_processes_exchange_halos(size: int) -> None:
    run(processes, size)


def arrays_of_each_kind() -> None:
    rank = dist.get_rank()
    field = np.arange(36.0).reshape(6, 6) + 100 * rank
    # Columns are not contiguous, the halos are a part of the same array, and a rank is its own neighbour.
    dist.neighbor_all_to_all([field[:, 0], field[:, -1]], [field[:, 1], field[:, -2]], (2,), periodic=True)
    other = np.arange(36.0).reshape(6, 6) + 100 * (1 - rank)
    assert (field[:, 0] == other[:, -2]).all()
    assert (field[:, -1] == other[:, 1]).all()
    memory = bytearray(4)
    dist.neighbor_all_to_all([None, memory] if rank == 0 else [memory, None], [b"abcd", b"efgh"], [2])
    assert memory == (b"abcd" if rank == 0 else b"efgh")


def test_arrays_have_any_layout_and_none_is_needed_at_a_border() -> None:
    run_ranks(arrays_of_each_kind, 2)


def in_a_group_of_some_ranks() -> None:
    group = dist.new_group([3, 1])
    if dist.get_rank() in (1, 3):
        mine = np.array([float(dist.get_rank())])
        found = np.zeros(1)
        is_first = dist.get_group_rank(group, dist.get_rank()) == 0
        outputs = [None, found] if is_first else [found, None]
        dist.neighbor_all_to_all(outputs, [mine, mine], (2,), group=group)
        assert found[0] == 4 - dist.get_rank()
        group.neighbor_all_to_all(outputs, [2 * mine, 2 * mine], (2,))
        assert found[0] == 8 - 2 * dist.get_rank()


def test_a_mesh_has_the_ranks_of_its_group() -> None:
    run_ranks(in_a_group_of_some_ranks, 4)


def overlapping_calls() -> None:
    rank, works, kept = dist.get_rank(), [], []
    for number in range(20):
        inputs = [np.array([10.0 * number + rank]), np.array([1000.0 + 10 * number + rank])]
        outputs = [np.zeros(1), np.zeros(1)]
        works.append(dist.neighbor_all_to_all(outputs, inputs, (2,), True, async_op=True))
        kept.append((outputs, inputs))
    for number, work in reversed(list(enumerate(works))):
        work.wait()
        (before, behind), _ = kept[number]
        assert before[0] == 1000 + 10 * number + 1 - rank
        assert behind[0] == 10 * number + 1 - rank


def test_calls_that_overlap() -> None:
    run_ranks(overlapping_calls, 2)


def sizes_that_come_to_the_same(many: int) -> str:
    """Rank 1 expects the sizes of its two arrays the other way round."""
    rank = dist.get_rank()
    inputs = [np.ones(many), np.ones(many + 2)]
    counts = (many + 2, many) if rank == 0 else (many, many + 2)
    outputs = [np.zeros(count) for count in counts]
    with pytest.raises(dist.CollectiveMismatch) as caught:
        dist.neighbor_all_to_all(outputs, inputs, (2,), periodic=True)
    assert all((output == 0).all() for output in outputs)
    return str(caught.value)


@transports
@pytest.mark.parametrize("many", [3, MANY])
def test_a_rank_on_both_sides_must_expect_both_sizes(many: int, transport: str) -> None:
    texts = run_ranks(sizes_that_come_to_the_same, 2, many, **placed(transport, 2))
    for text in texts:
        assert f"rank 0 gives {many} and {many + 2} float64 to rank 1" in text
        assert f"which expects {many + 2} and {many} from it" in text.replace(" float64 from", " from")
