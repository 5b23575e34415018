"""empty, zeros and full: memory that the ranks of one host share, which outlives its group."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from world import run


def owner_of(array: Any) -> str:
    """The type of what the memory of a NumPy array belongs to."""
    while isinstance(array, (np.ndarray, memoryview)):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return type(array).__name__


def test_without_a_group_it_is_ordinary_memory() -> None:
    assert dist.zeros((2, 3)).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert dist.zeros((2, 3)).dtype == np.float32
    assert dist.full(3, 7, "int16").tolist() == [7, 7, 7]
    assert dist.empty((0, 4), bool).shape == (0, 4)
    assert dist.empty((), "complex128").shape == ()
    assert dist.zeros(2, like=np.ones(5, np.uint8)).dtype == np.uint8
    assert dist.zeros(2, "bfloat16").dtype.name == "bfloat16"
    assert dist.zeros(np.int64(2), np.float64).dtype == np.float64


@pytest.mark.torch
def test_torch_tensors_are_allocated_for_torch() -> None:
    torch = pytest.importorskip("torch")
    tensor = dist.full((2, 2), 3, like=torch.ones(1, dtype=torch.bfloat16))
    assert isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16 and (tensor == 3).all()
    assert dist.zeros(3, torch.int64, library="torch").dtype == torch.int64


def test_what_cannot_be_allocated_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0 in `shape`"):
        dist.empty((2, -1))
    with pytest.raises(TypeError, match="expected `dtype` to be one of"):
        dist.empty(2, "datetime64[s]")
    with pytest.raises(ValueError, match="expected `library` to be one of numpy, torch"):
        dist.empty(2, library="cupy")
    with pytest.raises(TypeError):
        dist.empty(2.5)


def live_with_arena_arrays(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    shared = os.environ["PROCGROUP_TRANSPORT"] != "tcp"
    for count in (1, 5000, 300_000):
        array = dist.full(count, rank + 1)
        assert owner_of(array) == ("ArenaMemory" if shared else "bytearray")
        dist.all_reduce(array)
        assert (array == size * (size + 1) / 2).all()
        assert (dist.zeros(count) == 0).all()
    output = dist.zeros((size, 1000), "int64")
    dist.all_gather_single(output.reshape(-1), dist.full(1000, rank, "int64"))
    assert (output == np.arange(size)[:, None]).all()
    work = dist.all_reduce(dist.full(50_000, 1), async_op=True)
    gc.collect()
    work.wait()
    assert (work.result()[0] == size).all()
    read_in_a_child(array)
    dist.destroy_process_group()
    assert (array == size * (size + 1) / 2).all()
    array[...] = 5
    del output
    gc.collect()
    assert (array == 5).all()


def read_in_a_child(array: Any) -> None:
    """A forked child sees the elements; its end leaves the parent's memory alone."""
    child = os.fork()
    if child == 0:
        seen = int(array[0]) == int(array[-1])
        del array
        os._exit(0 if seen else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert array[0] == array[-1]


@pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])
def test_arrays_of_the_arena_work_and_outlive_the_group(transport: str) -> None:
    run(live_with_arena_arrays, 2, environment={"PROCGROUP_TRANSPORT": transport})


def allocate_often(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    addresses = set()
    for turn in range(20):
        array = dist.empty(1 << 20, "uint8")
        assert array[turn] == 0, "memory that came back reads as zero again"
        array[turn] = 1
        addresses.add(array.ctypes.data)
        del array
    assert len(addresses) == 1
    with pytest.raises(MemoryError):
        dist.empty(1 << 40, "uint8")
    dist.destroy_process_group()


def test_memory_goes_back_with_the_last_array() -> None:
    run(allocate_often, 2)
