"""``procgroup.empty(..., device=...)``: NCCL's memory in a window of all ranks."""

from __future__ import annotations

import copy
import ctypes
import gc
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nccl import gpu_arrays, stand_ins
from nccl.gpu_arrays import GpuArray

import procgroup as dist
from procgroup import _native
from procgroup.errors import ArgumentError, CollectiveMismatch, DistBackendError
from waiting import wait_until
from world import attempt, run

if gpu_arrays.MISSING:
    pytest.skip(gpu_arrays.MISSING, allow_module_level=True)

GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}


class WindowArray(GpuArray):
    """The part of CuPy's ndarray that procgroup uses, over memory that procgroup gives."""

    def __init__(self, memory: Any) -> None:
        interface = memory.__cuda_array_interface__
        self.shape, self.dtype, self.stream = interface["shape"], np.dtype(interface["typestr"]), gpu_arrays.LEGACY
        self.strides, self.is_readonly = None, False
        self._memory, self._begin = SimpleNamespace(address=interface["data"][0], owner=memory), 0  # type: ignore
        self.device = _native.gpu_of(self._address)

    def __getitem__(self, part: slice) -> WindowArray:
        return self.reshape((part.stop,))

    def __setitem__(self, where: Any, value: float) -> None:
        assert where is ...
        self.set(np.full(self.shape, value, self.dtype))

    def view(self, dtype: Any) -> WindowArray:
        made = self.reshape((self.size * self.dtype.itemsize // dtype.itemsize,))
        made.dtype = dtype
        return made

    def reshape(self, shape: tuple[int, ...]) -> WindowArray:
        made = copy.copy(self)
        made.shape = shape
        return made


def begin(rank: int, **options: Any) -> Any:
    """Join, with a library of arrays on the GPU, and return the stand-in's NCCL."""
    stand_ins.load()
    sys.modules["cupy"] = SimpleNamespace(asarray=WindowArray)  # type: ignore[assignment]
    dist.init_process_group("nccl", timeout=20, **options)
    gpu_arrays.start(rank)
    return ctypes.CDLL("libnccl.so.2")


def reduce_in_a_window(rank: int, size: int, eager: bool) -> tuple[list[float], list[int], int]:
    nccl = begin(rank, device_id=rank if eager else None)
    array = dist.full((2, 3), rank + 1, "float32", device=f"cuda:{rank}")
    dist.all_reduce(array)
    zeros = dist.zeros(5, "int16", device=rank)
    found = array.get().ravel().tolist(), zeros.get().tolist(), nccl.stand_in_windowed_operations()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "lazy"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_calls_on_the_array_read_the_memory_of_a_window(size: int, eager: bool) -> None:
    total = size * (size + 1) / 2
    for reduced, zeros, windowed in run(reduce_in_a_window, size, args=(eager,), environment=GPUS):
        assert reduced == [total] * 6 and zeros == [0] * 5
        assert windowed == (1 if size > 1 else 0)


def outlive_group(rank: int, size: int) -> tuple[int, int]:
    nccl = begin(rank)
    kept = dist.full(4, rank, "float32", device=rank)
    gone = dist.full(4, rank, "float32", device=rank)
    dist.all_reduce(gone)
    del gone
    gc.collect()
    before = nccl.stand_in_memories()
    dist.destroy_process_group()
    wait_until(lambda: nccl.stand_in_memories() == 1)
    assert kept.get().tolist() == [rank] * 4
    del kept
    gc.collect()
    wait_until(lambda: nccl.stand_in_memories() == 0)
    return before, nccl.stand_in_memories()


def test_memory_lives_as_long_as_its_group_and_its_arrays() -> None:
    assert run(outlive_group, 2, environment=GPUS) == [(2, 0)] * 2


def differ(rank: int, size: int) -> str:
    begin(rank)
    with pytest.raises(CollectiveMismatch) as raised:
        dist.empty(4 + rank, "float32", device=rank)
    return str(raised.value)


def test_ranks_that_ask_for_different_sizes_are_told_so() -> None:
    for text in run(differ, 2, environment=GPUS):
        assert "empty of 16 bytes on a GPU" in text and "empty of 20 bytes on a GPU" in text


def lack_memory(rank: int, size: int) -> str:
    begin(rank)
    if rank == 0:
        with pytest.raises(DistBackendError) as raised:
            dist.empty(4, "float32", device=rank)
        array = dist.empty(4, "float32", device=rank)  # the group goes on
    else:
        array = dist.empty(4, "float32", device=rank)
    array[...] = 1
    dist.all_reduce(array)
    assert array.get().tolist() == [2] * 4
    dist.destroy_process_group()
    return str(raised.value) if rank == 0 else ""


def test_a_gpu_without_memory_says_so_and_the_call_can_be_made_again() -> None:
    failing = [{"PROCGROUP_STAND_IN_NCCL_FAIL": "memalloc:1:cuda"}, {}]
    text, _ = run(lack_memory, 2, environment=GPUS, environments=failing)
    assert "out of memory" in text


def lose_a_rank(rank: int, size: int) -> None:
    begin(rank)
    dist.empty(4, "float32", device=rank)
    if rank == 1:
        raise RuntimeError("made by the test")
    dist.empty(4, "float32", device=rank)


def test_a_rank_that_is_lost_is_named() -> None:
    first, _ = attempt(lose_a_rank, 2, environment=GPUS)
    assert "empty #2" in str(first.error) and "rank 1" in str(first.error)


def refuse(rank: int, size: int) -> list[str]:
    begin(rank, device_id=rank)
    texts = []
    for arguments, error in (
        ({"device": f"cuda:{rank + 2}"}, ArgumentError),
        ({"device": "cuda"}, TypeError),
        ({"device": rank, "library": "numpy"}, ValueError),
        ({"device": rank, "group": dist.new_group(backend="gloo")}, ArgumentError),
    ):
        with pytest.raises(error) as raised:
            dist.empty(4, "float32", **arguments)
        texts.append(str(raised.value))
    del sys.modules["cupy"]
    with pytest.raises(ValueError, match="import torch or cupy"):
        dist.empty(4, device=rank)
    dist.destroy_process_group()
    return texts


def test_what_cannot_be_made_is_refused_before_the_other_ranks_are_asked() -> None:
    for rank, texts in enumerate(run(refuse, 2, environment=GPUS)):
        assert f"`device` is GPU {rank + 2}, but this group uses GPU {rank}" in texts[0]
        assert "number of a GPU" in texts[1] and "torch, cupy" in texts[2] and '"nccl"' in texts[3]


class Pool:
    """The part of ``torch.cuda.MemPool`` that procgroup uses, whose allocator is called as torch calls it.

    Addresses do not grow in the order of the allocations on all ranks.
    """

    def __init__(self, rank: int, nbytes: tuple[int, ...]) -> None:
        path, allocate, free = dist.group.WORLD.mem_allocator
        library = ctypes.CDLL(path)
        size, integer, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        allocate = ctypes.CFUNCTYPE(pointer, size, integer, pointer)((allocate, library))
        self._free = ctypes.CFUNCTYPE(None, pointer, size, integer, pointer)((free, library))
        self.segments = [(allocate(one, rank, None), one) for one in nbytes]
        self._rank = rank

    def snapshot(self) -> list[dict[str, int]]:
        found = [{"address": address, "total_size": size} for address, size in self.segments]
        return found[::-1] if self._rank % 2 else found

    def array(self, place: int) -> WindowArray:
        address, nbytes = self.segments[place]
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        return WindowArray(SimpleNamespace(__cuda_array_interface__=interface)).view(np.dtype("float32"))

    def free(self) -> None:
        for address, nbytes in self.segments:
            self._free(address, nbytes, self._rank, None)


def begin_with_torch(rank: int, **options: Any) -> Any:
    """``begin``, with a torch that has CUDA, whose allocator is the arguments of its class."""
    nccl = begin(rank, **options)

    def allocator(*arguments: str) -> SimpleNamespace:
        return SimpleNamespace(allocator=lambda: arguments)

    memory = SimpleNamespace(CUDAPluggableAllocator=allocator)
    cuda = SimpleNamespace(is_built=lambda: True)
    sys.modules["torch"] = SimpleNamespace(  # type: ignore[assignment]
        backends=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(memory=memory)
    )
    return nccl


def reduce_in_a_pool(rank: int, size: int) -> list[int]:
    nccl = begin_with_torch(rank)
    pool = Pool(rank, (4096, 8192))
    for place in (0, 1):
        array = pool.array(place)
        array[...] = rank + place
        dist.all_reduce(array)
        assert set(array.get().tolist()) == {size * (size - 1) / 2 + size * place}
    counts = [nccl.stand_in_windowed_operations()]
    for _ in range(2):  # the second time there is nothing new
        dist.group.WORLD.register_mem_pool(pool)
    for place in (0, 1):
        dist.all_reduce(pool.array(place))
    pool.array(1).get()
    counts.append(nccl.stand_in_windowed_operations())
    pool.free()
    dist.barrier()
    counts.append(nccl.stand_in_memories())
    dist.destroy_process_group()
    wait_until(lambda: nccl.stand_in_memories() == 0)
    return counts


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_memory_of_a_registered_pool_is_read_in_place_and_freed_after_its_group(size: int) -> None:
    windowed = 2 if size > 1 else 0
    assert run(reduce_in_a_pool, size, environment=GPUS) == [[0, windowed, 2]] * size


def register_other_sizes(rank: int, size: int) -> str:
    begin_with_torch(rank)
    with pytest.raises(CollectiveMismatch) as raised:
        dist.group.WORLD.register_mem_pool(Pool(rank, (4096, 8192) if rank else (8192, 4096)))
    return str(raised.value)


def test_pools_of_other_sizes_are_refused_on_all_ranks() -> None:
    for text in run(register_other_sizes, 2, environment=GPUS):
        assert text.count("register_mem_pool of 12288 bytes on a GPU") == 2 and "sizes #" in text


def refuse_pools(rank: int, size: int) -> list[str]:
    nccl = begin_with_torch(rank, device_id=rank)
    world = dist.group.WORLD
    first = Pool(rank, (4096, 8192))
    assert [address is None for address, _ in first.segments] == [True, False]  # the first is more than there is
    first.segments.pop(0)
    texts = []
    other: Any = dist.new_group(backend="gloo")
    foreign = SimpleNamespace(snapshot=lambda: [{"address": 4096}])
    elsewhere = Pool((rank + 2) % 4, (4096,))
    for call in (
        lambda: world.register_mem_pool(foreign),
        lambda: world.register_mem_pool(elsewhere),
        lambda: other.register_mem_pool(first),
        lambda: other.mem_allocator,
    ):
        with pytest.raises(ArgumentError) as raised:
            call()
        texts.append(str(raised.value))
    world.register_mem_pool(first)
    first.free()
    elsewhere.free()
    dist.destroy_process_group()
    wait_until(lambda: nccl.stand_in_memories() == 0)
    return texts


def test_what_is_no_pool_of_the_group_is_refused_before_the_other_ranks_are_asked() -> None:
    failing = {"PROCGROUP_STAND_IN_NCCL_FAIL": "memalloc:1:cuda"}
    for rank, texts in enumerate(run(refuse_pools, 2, environment={**GPUS, **failing})):
        assert "memory that NCCL has not allocated" in texts[0] and "group.mem_allocator" in texts[0]
        assert f"`pool` has memory of GPU {rank + 2}, but this group uses GPU {rank}" in texts[1]
        assert all('no backend "nccl"' in text for text in texts[2:])


def test_there_is_no_memory_before_a_group_has_lent_it() -> None:
    allocate = ctypes.CDLL(_native.__file__).procgroup_allocate
    allocate.restype = ctypes.c_void_p
    assert allocate(ctypes.c_size_t(4096), 0, None) is None


def ask_for_allocator(rank: int, size: int) -> str:
    begin(rank)
    with pytest.raises(ArgumentError) as raised:
        _ = dist.group.WORLD.mem_allocator
    dist.destroy_process_group()
    return str(raised.value)


def test_a_torch_without_cuda_has_no_pools() -> None:
    torch = pytest.importorskip("torch")
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA")
    (text,) = run(ask_for_allocator, 1, environment=GPUS)
    assert "built without CUDA" in text
