"""Arrays that are not contiguous, with another layout on each rank: the right numbers, and nothing beside them.

One world plays every operation with every layout.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from operation_table import EVERY_RANK
from seeded_cases import Case, CasePart, TorchPart

import procgroup as dist
from procgroup.testing import run_ranks
from world import run

LAYOUTS = ["matrix of columns", "matrix backwards", "both reversed", "offset", "column", "transposed", "backwards"]
COUNTS = [0, 1, 5, 4096]
DTYPES = ["float32", "int16", "complex64", "int64"]


def play_in_processes(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    play_layouts(CasePart)
    dist.destroy_process_group()


def play_layouts(part_of: type[CasePart]) -> None:
    """Play every operation; each layout comes first once, and the ranks and the arrays of a list go on from there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, name in enumerate(EVERY_RANK):
        for turn in range(len(LAYOUTS)):
            layouts = tuple(LAYOUTS[turn:] + LAYOUTS[:turn])
            for count in (*COUNTS, 70_000 if turn == number % 2 else 2):
                case = Case(name, DTYPES[(turn + count) % 4], count, root=(size - 1) * (turn % 2), layouts=layouts)
                part = part_of(case, rank, size)
                part.start(dist, async_op=bool(turn % 2) or name == "ring")
                part.wait()
                assert not part.wrong(), f"{case}: {part.wrong()}"


@pytest.mark.parametrize(("transport", "size"), [("shm", 3), ("tcp", 2)])
def test_any_layout_gives_the_right_numbers_and_changes_nothing_else(transport: str, size: int) -> None:
    run(play_in_processes, size, environment={"PROCGROUP_TRANSPORT": transport})


@pytest.mark.torch
def test_torch_tensors_of_any_layout_give_the_right_numbers() -> None:
    pytest.importorskip("torch")
    run_ranks(play_layouts, 2, TorchPart, timeout=55)


def fail_with_strided_arrays(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    part = CasePart(Case("all_reduce", "float32", 50_000 + rank, layouts=tuple(LAYOUTS)), rank, size)
    with pytest.raises(dist.CollectiveMismatch):
        part.start(dist)
    assert not part.changed()
    dist.destroy_process_group()


def test_a_failed_call_leaves_strided_arrays_as_they_were() -> None:
    run(fail_with_strided_arrays, 2)


def keep_what_async_calls_use() -> None:
    """Drop the last names of arrays, and give a tensor other memory, while rank 1 keeps the calls waiting."""
    torch = sys.modules["torch"]
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 1:
        assert dist.recv(np.zeros(1), 0) == 0
    kept = torch.ones(100_000)
    works = [dist.all_reduce(np.ones(100_000), async_op=True), dist.all_reduce(kept, async_op=True)]
    results = [work.result for work in works]
    if rank == 0:
        memory = kept.untyped_storage()
        kept.set_(torch.zeros(100_000))
        dist.send(np.zeros(1), 1)
        for work in works:
            work.wait()
        assert (torch.tensor([], dtype=torch.float32).set_(memory) == size).all()
        assert (kept == 0).all()
        assert (results[0]()[0] == size).all()
    for work in works:
        work.wait()


@pytest.mark.torch
def test_async_calls_keep_their_arrays_and_the_memory_of_tensors() -> None:
    pytest.importorskip("torch")
    run_ranks(keep_what_async_calls_use, 2)
