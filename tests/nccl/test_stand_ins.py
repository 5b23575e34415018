"""The stand-ins for libcuda and libnccl: what nccl4py and cuda.core compute, refuse and report over them.

Needs ``pip install nccl4py "cuda-bindings~=13.0"`` (found to work: nccl4py 0.6.0, cuda-core 1.2.2, cuda-bindings
13.5.0, cuda-pathfinder 1.9.1; no nvidia-nccl wheel, no GPU). Skipped where they are missing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from nccl import stand_ins

from world import attempt, run, run_command, start


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# Not pytest.importorskip: a rank imports this file too, and loads the stand-ins before it imports nccl.
if not all(map(_is_installed, ("nccl.bindings.nccl", "cuda.core", "cuda.bindings"))):
    pytest.skip('needs pip install nccl4py "cuda-bindings~=13.0"', allow_module_level=True)

SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = range(8)
SUM, PROD, MAX, MIN, AVG = range(5)
FLOAT32 = 7
DTYPES = {"i1": 0, "u1": 1, "i4": 2, "u4": 3, "i8": 4, "u8": 5, "f2": 6, "f4": FLOAT32, "f8": 8, "bfloat16": 9}
GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    stand_ins.build()  # before the deadlines of the worlds begin


class Rank:
    """One rank with a GPU, a stream, and a communicator of all ranks."""

    def __init__(self, rank: int, size: int, gpu: int | None = None, blocking: bool = True) -> None:
        stand_ins.load()
        sys.modules["torch"] = None  # type: ignore[assignment]  # nccl4py would import it at the first operation
        import nccl.core
        from cuda.bindings import driver
        from cuda.core import Device
        from nccl.bindings import nccl as bindings

        self.rank, self.size = rank, size
        self.nccl, self.bindings, self.driver = nccl.core, bindings, driver
        self.device = Device(rank if gpu is None else gpu)
        self.device.set_current()
        self.stream = self.device.create_stream()
        self.communicator = self.connect("world", blocking)

    def connect(self, name: str, blocking: bool = True) -> Any:
        """Return a communicator of all ranks; with blocking=False it is still in progress."""
        config = self.nccl.NCCLConfig(blocking=blocking)
        # In place of a store: what ncclGetUniqueId returns begins like this, and the port is the world's own.
        letters = f"procgroup-stand-in-{os.environ['MASTER_PORT']}-{name}".encode()
        unique_id = self.nccl.UniqueId.from_bytes(letters.ljust(128, b"\0"))
        return self.nccl.Communicator.init(self.size, self.rank, unique_id, config=config)

    def upload(self, array: np.ndarray) -> Any:
        buffer = self.device.allocate(max(array.nbytes, 1), stream=self.stream)
        if array.nbytes:
            assert self.driver.cuMemcpyHtoD(int(buffer.handle), array.ctypes.data, array.nbytes)[0] == 0
        return buffer

    def download(self, buffer: Any, like: np.ndarray) -> np.ndarray:
        """Return a buffer's contents as an array of this shape and dtype, after the stream's work."""
        self.stream.sync()
        array = np.empty_like(like)
        if array.nbytes:
            assert self.driver.cuMemcpyDtoH(array.ctypes.data, int(buffer.handle), array.nbytes)[0] == 0
        return array

    def call(self, name: str, *arguments: Any, communicator: Any = None, stream: Any = None) -> None:
        """Call one of the bindings' operations; buffers stand for their addresses."""
        numbers = [getattr(argument, "handle", argument) for argument in arguments]
        communicator = communicator or self.communicator
        getattr(self.bindings, name)(*map(int, numbers), communicator._comm, int((stream or self.stream).handle))

    def settle(self, communicator: Any = None, timeout: float = 10) -> int:
        """Return a communicator's state once it is not in progress."""
        deadline = time.monotonic() + timeout
        while (state := int((communicator or self.communicator).get_async_error())) == IN_PROGRESS:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        return state

    def state_after(self, communicator: Any, timeout: float = 10) -> int:
        """Return the error of a communicator once it has one."""
        deadline = time.monotonic() + timeout
        while (state := int(communicator.get_async_error())) in (SUCCESS, IN_PROGRESS):
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        return state

    @contextmanager
    def held(self, stream: Any = None) -> Iterator[None]:
        """Let a stream begin no work of the body before the end of the body."""
        gate = threading.Event()
        wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait(20) and None)
        function = self.driver.CUhostFn(ctypes.cast(wait, ctypes.c_void_p).value)
        assert self.driver.cuLaunchHostFunc(int((stream or self.stream).handle), function, 0)[0] == 0
        held = (stream or self.stream).record()
        try:
            yield
        finally:
            gate.set()
            held.sync()

    def send_signal(self, peer: int) -> None:
        self.call("send", self.upload(np.ones(1, "f4")), 1, FLOAT32, peer)
        self.stream.sync()

    def receive_signal(self, peer: int) -> None:
        self.call("recv", self.upload(np.ones(1, "f4")), 1, FLOAT32, peer)
        self.stream.sync()

    @contextmanager
    def refuses(self, status: int, words: str = "") -> Iterator[None]:
        with pytest.raises(self.bindings.NCCLError) as caught:
            yield
        assert caught.value.status == status
        assert re.search(words, self.communicator.get_last_error())


def _values(dtype: Any, count: int, rank: int) -> np.ndarray:
    """Small integers, so that every dtype has the sums and products exactly."""
    return ((np.arange(count) + rank) % 3 + 1).astype(dtype)


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _reduced(arrays: list[np.ndarray], op: int) -> np.ndarray:
    functions: dict[int, Callable[..., Any]] = {SUM: np.sum, PROD: np.prod, MAX: np.max, MIN: np.min, AVG: np.sum}
    wide = np.float64 if arrays[0].dtype.kind not in "iu" else arrays[0].dtype
    total = functions[op](np.stack(arrays).astype(wide), axis=0)
    if op == AVG:
        total = total // len(arrays) if arrays[0].dtype.kind in "iu" else total / len(arrays)
    return total.astype(arrays[0].dtype)


def reduce_everything(rank: int, size: int) -> None:
    """AllReduce, Reduce and ReduceScatter of every dtype and op, for several counts, in place and not."""
    me = Rank(rank, size)
    for (name, number), op, count in itertools.product(DTYPES.items(), range(5), (1, 37)):
        dtype = _dtype(name)
        arrays = [_values(dtype, count * size, peer) for peer in range(size)]
        expected = _reduced(arrays, op)
        block = slice(rank * count, (rank + 1) * count)
        mine, result = me.upload(arrays[rank]), me.upload(np.zeros_like(expected))
        root = count % size

        me.call("all_reduce", mine, result, count * size, number, op)
        np.testing.assert_array_equal(me.download(result, expected), expected, err_msg=f"{name} {op}")
        me.call("reduce_scatter", mine, result, count, number, op)
        np.testing.assert_array_equal(me.download(result, expected[block]), expected[block])
        me.call("reduce", mine, mine, count * size, number, op, root)
        after = expected if rank == root else arrays[rank]
        np.testing.assert_array_equal(me.download(mine, after), after)
    me.communicator.destroy()


def move_everything(rank: int, size: int) -> None:
    """The operations that move blocks, and messages."""
    me = Rank(rank, size)
    for count, root in ((1, 0), (1025, size - 1), (0, 1)):
        everyone = np.stack([np.arange(size * count) * 10 + peer for peer in range(size)]).astype("f4")
        own = everyone[rank]
        first = everyone[:, :count]
        cases = {
            "all_gather": (own[:count], first.ravel(), ()),
            "allto_all": (own, everyone[:, rank * count : (rank + 1) * count].ravel(), ()),
            "broadcast": (own[:count], first[root], (root,)),
            "gather": (own[:count], first.ravel() if rank == root else None, (root,)),
            "scatter": (own, everyone[root, rank * count : (rank + 1) * count], (root,)),
        }
        for name, (sent, expected, arguments) in cases.items():
            untouched = np.full(size * count, -1, "f4")
            expected = untouched if expected is None else expected
            received = me.upload(untouched)
            me.call(name, me.upload(sent.copy()), received, count, FLOAT32, *arguments)
            np.testing.assert_array_equal(me.download(received, expected), expected, err_msg=name)

    values = _values("f4", 300_000, rank)  # more than a socket takes at once
    sent, received, to_itself = me.upload(values), me.upload(values * 0), me.upload(values * 0)
    with me.nccl.group():
        me.call("send", sent, values.size, FLOAT32, (rank + 1) % size)
        me.call("recv", received, values.size, FLOAT32, (rank - 1) % size)
        me.call("send", sent, values.size, FLOAT32, rank)
        me.call("recv", to_itself, values.size, FLOAT32, rank)
    before = _values("f4", values.size, (rank - 1) % size)
    np.testing.assert_array_equal(me.download(received, before), before)
    np.testing.assert_array_equal(me.download(to_itself, values), values)
    me.communicator.destroy()


def use_public_names(rank: int, size: int) -> None:
    """nccl4py's own methods, with arrays of the CUDA array interface, and its factors."""
    me = Rank(rank, size)

    class Array:
        def __init__(self, buffer: Any) -> None:
            self.buffer = buffer
            self.__cuda_array_interface__ = {
                "shape": (8,),
                "typestr": "<f4",
                "data": (int(buffer.handle), False),
                "version": 3,
            }

    values = np.arange(8, dtype="f4")
    buffer = me.nccl.mem_alloc(32)
    result = me.upload(values)
    me.communicator.broadcast(Array(me.upload(values)), Array(buffer), 1, stream=me.stream)
    me.communicator.allreduce(Array(buffer), Array(result), me.nccl.SUM, stream=me.stream)
    np.testing.assert_array_equal(me.download(result, values), values * size)

    for residence in (0, 1):  # the factor is on the device, or on the host
        factor = np.array([0.5 + rank], "f4")
        on_device = me.upload(factor)
        address = factor.ctypes.data if residence else int(on_device.handle)
        op = me.bindings.red_op_create_pre_mul_sum(address, FLOAT32, residence, me.communicator._comm)
        me.call("all_reduce", me.upload(values), result, 8, FLOAT32, op)
        expected = values * sum(0.5 + peer for peer in range(size))
        np.testing.assert_array_equal(me.download(result, expected), expected)
        me.bindings.red_op_destroy(op, me.communicator._comm)
        with me.refuses(INVALID_ARGUMENT, f"AllReduce : reduction operation {op} unknown"):
            me.call("all_reduce", result, result, 8, FLOAT32, op)

    assert str(me.nccl.get_version().libnccl.version) == "2.30.7"
    handle = me.communicator.register_buffer(buffer)
    handle.close()
    me.communicator.destroy()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("function", [reduce_everything, move_everything])
def test_operations_compute_what_numpy_does(function: Callable[..., None], size: int) -> None:
    run(function, size, environment=GPUS)


def test_nccl4py_finds_the_stand_ins_by_its_public_names() -> None:
    run(use_public_names, 2, environment=GPUS)


def order_streams(rank: int, size: int) -> None:
    me = Rank(rank, size)
    other = me.device.create_stream()
    from cuda.core import LegacyPinnedMemoryResource

    pinned = LegacyPinnedMemoryResource().allocate(400)
    values = np.from_dlpack(pinned).view("f4")
    values[:] = 1
    result = me.upload(values)

    buffer = me.upload(values * 0)
    with me.held():
        buffer.copy_from(pinned, stream=me.stream)
        me.call("all_reduce", buffer, result, 100, FLOAT32, SUM, stream=other)
        other.sync()
        too_early = np.empty_like(values)
        me.driver.cuMemcpyDtoH(too_early.ctypes.data, int(result.handle), 400)
    assert (too_early == 0).all()

    buffer = me.upload(values * 0)
    with me.held():
        buffer.copy_from(pinned, stream=me.stream)
        other.wait(me.stream.record())
        me.call("all_reduce", buffer, result, 100, FLOAT32, SUM, stream=other)
    other.sync()
    assert (me.download(result, values) == size).all()

    # Two streams, one communicator: in the order of the calls, although the first stream is late.
    with me.held():
        me.call("broadcast", me.upload(np.full(100, 5, "f4")), buffer, 100, FLOAT32, 0)
        me.call("all_reduce", result, buffer, 100, FLOAT32, SUM, stream=other)
    other.sync()
    assert (me.download(buffer, values) == size * size).all()


def delay(rank: int, size: int) -> float:
    me = Rank(rank, size)
    begin = time.monotonic()
    me.stream.record().sync()
    return time.monotonic() - begin


def free_too_early(rank: int, size: int) -> None:
    me = Rank(rank, size)
    buffer, result = me.upload(np.zeros(10, "f4")), me.upload(np.zeros(10, "f4"))
    other = me.device.create_stream()
    with me.held():
        me.call("all_reduce", buffer, result, 10, FLOAT32, SUM)
        buffer.close(other)
        other.sync()
    assert me.state_after(me.communicator) == CUDA_ERROR
    assert "illegal address" in me.communicator.get_last_error()
    me.communicator.abort()
    me.stream.sync()


def read_device_memory(rank: int, size: int) -> None:
    me = Rank(rank, size)
    ctypes.string_at(int(me.upload(np.zeros(10)).handle), 8)


def test_a_missing_wait_shows_as_wrong_data() -> None:
    run(order_streams, 2, environment=GPUS)


def test_each_operation_of_a_stream_is_delayed_on_request() -> None:
    assert run(delay, 1, environment={"PROCGROUP_STAND_IN_DELAY_US": "20000"})[0] >= 0.02


def test_memory_that_is_freed_before_its_operation_is_an_error() -> None:
    run(free_too_early, 1)


def test_the_host_cannot_read_device_memory() -> None:
    (outcome,) = attempt(read_device_memory, 1)
    assert outcome.exit_code == -11


def use_without_blocking(rank: int, size: int) -> None:
    me = Rank(rank, size)
    blocking = me.communicator
    if rank == 0:
        me.receive_signal(1)
    me.communicator = me.connect("late", blocking=False)
    if rank == 1:
        assert me.communicator.get_async_error() == IN_PROGRESS
        with me.refuses(INVALID_ARGUMENT, "before the previous operation returned ncclSuccess"):
            me.bindings.comm_count(me.communicator._comm)
        late, me.communicator = me.communicator, blocking
        me.send_signal(0)
        me.communicator = late
    assert me.settle() == SUCCESS
    assert (me.communicator.nranks, me.communicator.rank, me.communicator.device.device_id) == (size, rank, rank)

    values = np.ones(10, "f4")
    buffer, result = me.upload(values), me.upload(values * 0)
    other = me.device.create_stream()
    flag = me.upload(values)
    if rank == 1:  # waits until rank 0 has looked
        me.call("recv", flag, 1, FLOAT32, 0, communicator=blocking)
        me.stream.sync()
    me.call("all_reduce", buffer, result, 10, FLOAT32, SUM)
    too_early = me.stream.record()  # NCCL enqueues the operation later, in a thread
    with me.refuses(INVALID_ARGUMENT, "before the previous operation returned ncclSuccess"):
        me.call("all_reduce", buffer, result, 10, FLOAT32, SUM)
    assert me.settle() == SUCCESS
    done = me.stream.record()
    if rank == 0:
        too_early.sync()
        assert not done.is_done
        me.call("send", flag, 1, FLOAT32, 1, communicator=blocking, stream=other)
    assert (me.download(result, values) == size).all()

    with me.nccl.group():  # its streams wait for each other
        me.call("all_reduce", buffer, result, 10, FLOAT32, SUM)
        me.call("all_reduce", buffer, buffer, 10, FLOAT32, SUM, stream=other)
    assert me.settle() == SUCCESS
    assert (me.download(result, values) == size).all()
    assert (me.download(buffer, values) == size).all()

    child = me.communicator.split(rank % 2, -rank)
    assert me.settle() == SUCCESS
    assert (child.nranks, child.rank) == (1, 0)
    child.destroy()
    me.communicator.finalize()
    assert me.settle() == SUCCESS
    me.communicator.destroy()


def test_a_non_blocking_communicator_is_in_progress_until_polled() -> None:
    run(use_without_blocking, 2, environment={**GPUS, "PROCGROUP_STAND_IN_NCCL_DELAY_US": "1000000"})


def abort_after_a_death(rank: int, size: int) -> str:
    me = Rank(rank, size, blocking=False)
    me.settle()
    buffer = me.upload(np.ones(10, "f4"))
    me.call("all_reduce", buffer, buffer, 10, FLOAT32, SUM)
    me.settle()
    me.stream.sync()
    print("ready")
    if rank == size - 1:
        time.sleep(60)
    me.call("all_reduce", buffer, buffer, 10, FLOAT32, SUM)
    assert me.settle() == SUCCESS
    done = me.stream.record()
    time.sleep(0.3)  # for nothing to happen
    assert not done.is_done
    assert me.communicator.get_async_error() == SUCCESS
    survivors = me.communicator.shrink([size - 1], flag=me.nccl.CommShrinkFlag.ABORT)
    me.settle()
    done.sync()
    me.communicator.abort()
    result = me.upload(np.ones(10, "f4"))
    me.call("all_reduce", result, result, 10, FLOAT32, SUM, communicator=survivors)
    me.settle(survivors)
    assert (me.download(result, np.ones(10, "f4")) == size - 1).all()
    me.call("all_reduce", result, result, 5 if rank == 0 else 10, FLOAT32, SUM, communicator=survivors)
    survivors.abort()
    me.stream.sync()
    return "ended"


def test_a_death_leaves_the_others_waiting_until_abort_or_shrink() -> None:
    with start(abort_after_a_death, 3, environment=GPUS) as world:
        world.wait_for_output(2, "ready")
        world.kill(2)
        outcomes = world.wait(timeout=10)
    assert [outcome.value for outcome in outcomes[:2]] == ["ended", "ended"], outcomes


MISMATCHES = {
    "count": [("all_reduce", 10, FLOAT32, SUM), ("all_reduce", 9, FLOAT32, SUM)],
    "empty": [("all_reduce", 10, FLOAT32, SUM), ("all_reduce", 0, FLOAT32, SUM)],
    "dtype": [("all_reduce", 10, FLOAT32, SUM), ("all_reduce", 10, DTYPES["i4"], SUM)],
    "op": [("all_reduce", 10, FLOAT32, SUM), ("all_reduce", 10, FLOAT32, MAX)],
    "root": [("broadcast", 10, FLOAT32, 0), ("broadcast", 10, FLOAT32, 1)],
    "operation": [("all_reduce", 10, FLOAT32, SUM), ("all_gather", 5, FLOAT32)],
}


def differ(rank: int, size: int) -> None:
    me = Rank(rank, size)
    buffer = me.upload(np.ones(20, "f4"))
    communicator = me.communicator.split(0, rank)
    for name, calls in MISMATCHES.items():
        operation, *arguments = calls[rank]
        me.call(operation, buffer, buffer, *arguments, communicator=communicator)
        assert me.state_after(communicator) == INVALID_USAGE, name
        assert re.search(r"Mismatch : rank \d is in \w+ of \d+ x", communicator.get_last_error()), name
        assert not me.stream.record().is_done or arguments[0] == 0  # which NCCL drops
        failed, communicator = communicator, me.communicator.split(0, rank)  # both ranks have the error then
        failed.abort()
        me.stream.sync()
    if rank == 0:
        me.call("send", buffer, 10, FLOAT32, 1, communicator=communicator)
    else:
        me.call("recv", buffer, 8, FLOAT32, 0, communicator=communicator)
    assert me.state_after(communicator) == INVALID_USAGE
    assert "rank 1 is in Recv of 8 x float32, rank 0 is in Send of 10 x float32" in communicator.get_last_error()
    me.communicator.split(0, rank)
    communicator.abort()


def test_calls_that_differ_are_reported_on_all_ranks() -> None:
    run(differ, 2, environment=GPUS)


def connect_on_gpu_0(rank: int, size: int) -> Any:
    try:
        me = Rank(rank, size, gpu=0)
    except Exception as error:
        from nccl.bindings import nccl as bindings

        return error.status, bindings.get_last_error(bindings.Comm(0))  # type: ignore[attr-defined]
    me.communicator.destroy()
    return "connected"


def test_two_ranks_on_one_gpu_are_refused_unless_nccl_is_told_otherwise() -> None:
    refusal = (INVALID_USAGE, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device /0")
    assert run(connect_on_gpu_0, 2) == [refusal, refusal]
    assert run(connect_on_gpu_0, 2, environment={"NCCL_MULTI_RANK_GPU_ENABLE": "1"}) == ["connected"] * 2
    hosts = [{"NCCL_HOSTID": "a"}, {"NCCL_HOSTID": "b"}]
    assert run(connect_on_gpu_0, 2, environments=hosts) == ["connected"] * 2


def fail_on_request(rank: int, size: int) -> None:
    me = Rank(rank, size)
    buffer = me.upload(np.ones(10, "f4"))
    all_reduce = ("all_reduce", buffer, buffer, 10, FLOAT32, SUM)
    me.call(*all_reduce)
    children = [me.communicator.split(0, rank) for _ in range(3)]
    me.call(*all_reduce, communicator=children[0])
    if rank == 0:
        assert me.state_after(children[0]) == SYSTEM_ERROR
        assert children[0].get_last_error() == "AllReduce failed on request"
        with me.refuses(SYSTEM_ERROR, "failed before"):
            me.call(*all_reduce, communicator=children[0])
    else:
        time.sleep(0.1)
        assert children[0].get_async_error() == SUCCESS
    assert not me.stream.record().is_done
    children[0].abort()
    me.stream.sync()

    me.call(*all_reduce, communicator=children[1])
    time.sleep(0.1)
    assert children[1].get_async_error() == SUCCESS
    assert not me.stream.record().is_done
    children[1].abort()
    me.stream.sync()

    if rank == 0:
        with me.refuses(REMOTE_ERROR, "allreduce failed on request"):
            me.call(*all_reduce, communicator=children[2])
    children[2].abort()

    failing = me.connect("failing", blocking=False)
    if rank == 0:
        assert me.state_after(failing) == INTERNAL_ERROR
    failing.abort()
    hanging = me.connect("hanging", blocking=False)
    time.sleep(0.1)
    assert hanging.get_async_error() == IN_PROGRESS
    hanging.abort()
    if rank == 0:
        with me.refuses(SYSTEM_ERROR, "init failed on request"):
            me.connect("refused")
    me.communicator.destroy()


def test_errors_come_on_request() -> None:
    requests = (
        "allreduce:2:system,allreduce:3:hang,allreduce:4:call-remote,init:2:internal,init:3:hang,init:4:call-system"
    )
    run(fail_on_request, 2, environments=[{**GPUS, "PROCGROUP_STAND_IN_NCCL_FAIL": requests}, GPUS])


def divide(rank: int, size: int) -> None:
    me = Rank(rank, size)
    values = np.array([rank], "f4")

    def members(communicator: Any) -> list[float]:
        result = me.upload(np.zeros(communicator.nranks, "f4"))
        me.call("all_gather", me.upload(values), result, 1, FLOAT32, communicator=communicator)
        return me.download(result, np.zeros(communicator.nranks, "f4")).tolist()

    pair = me.communicator.split(rank // 2, key=-rank)
    assert members(pair) == [rank // 2 * 2 + 1, rank // 2 * 2]
    trio = me.communicator.split(None if rank == 1 else 7)
    assert not trio.is_valid if rank == 1 else members(trio) == [0, 2, 3]
    if rank not in (0, 3):
        rest = me.communicator.shrink([0, 3])
        assert members(rest) == [1, 2]
        assert members(rest.split(0)) == [1, 2]
    me.communicator.revoke()
    with me.refuses(INVALID_USAGE, "AllGather : the communicator was revoked"):
        members(me.communicator)
    assert members(me.communicator.split(0)) == [0, 1, 2, 3]


def test_split_shrink_and_revoke_make_communicators_of_some_ranks() -> None:
    run(divide, 4, environment=GPUS)


def misuse(rank: int, size: int) -> None:
    me = Rank(rank, size)
    host = np.ones(10, "f4")
    buffer = me.upload(host)
    arguments = (10, FLOAT32, SUM)
    with me.refuses(INVALID_ARGUMENT, "AllReduce : sendbuff (0|.nil.) is not a valid pointer"):
        me.call("all_reduce", 0, buffer, *arguments)
    with me.refuses(INVALID_ARGUMENT, "AllReduce : recvbuff 0x.* is not a valid pointer"):
        me.call("all_reduce", buffer, host.ctypes.data, *arguments)
    with me.refuses(INVALID_ARGUMENT, "has not the 44 bytes of the call"):
        me.call("all_reduce", buffer, buffer, 11, FLOAT32, SUM)
    with me.refuses(INVALID_ARGUMENT, r"Broadcast : invalid root 1 \(root should be in the 0..1 range\)"):
        me.call("broadcast", buffer, buffer, 10, FLOAT32, 1)
    with me.refuses(INVALID_ARGUMENT, "invalid type 12"):
        me.call("all_reduce", buffer, buffer, 10, 12, SUM)
    with me.refuses(INVALID_ARGUMENT, "reduction operation 9 unknown to this communicator"):
        me.call("all_reduce", buffer, buffer, 10, FLOAT32, 9)
    with me.refuses(INVALID_USAGE, "not in a group call"):
        me.nccl.group_end()

    untouched = me.upload(host * 0)
    me.nccl.group_start()
    me.call("all_reduce", buffer, untouched, *arguments)
    with me.refuses(INVALID_ARGUMENT):
        me.call("send", buffer, 10, FLOAT32, 5)
    with me.refuses(INVALID_ARGUMENT, "Send : invalid root 5"):
        me.nccl.group_end()  # and none of the group's operations is enqueued
    assert (me.download(untouched, host) == 0).all()

    from cuda.core import Device

    Device(1).set_current()
    elsewhere = Device(1).allocate(40, stream=Device(1).create_stream())
    me.device.set_current()
    with me.refuses(INVALID_ARGUMENT, "allocated on device 1 mismatchs with NCCL device 0"):
        me.call("all_reduce", elsewhere, elsewhere, *arguments)

    me.size = 2
    twice = [me.connect("twice", blocking=False) for _ in range(2)]  # as rank 0, both
    deadline = time.monotonic() + 5
    while INTERNAL_ERROR not in [int(communicator.get_async_error()) for communicator in twice]:
        assert time.monotonic() < deadline
    assert me.communicator.get_last_error() == "Bootstrap : rank 0 of 2 ranks has already checked in"
    for communicator in twice:
        communicator.abort()
    handle = me.bindings.Comm(me.communicator.ptr)
    me.communicator.destroy()
    for use in (me.bindings.comm_abort, me.bindings.comm_destroy, me.bindings.comm_get_async_error):
        with pytest.raises(me.bindings.NCCLError, match="InvalidArgument"):
            use(handle)


def test_misuse_is_refused_in_words() -> None:
    run(misuse, 1, environment=GPUS)


PROGRAM = """
import nccl.core
from cuda.core import Device
devices = Device.get_all_devices()
print(nccl.core.get_version().libnccl.version, len(nccl.core.get_unique_id().as_bytes), len(devices))
"""


def test_a_program_finds_the_stand_ins_by_its_environment() -> None:
    done = run_command([sys.executable, "-c", PROGRAM], environment=stand_ins.environment(gpus=3))
    assert done.stdout == "2.30.7 128 3\n", done.stderr
