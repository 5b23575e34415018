"""The stand-ins for libcuda and libnccl: what hides no mistake of procgroup's, and what they do on request.

Their results, and the errors that are requested of NCCL, show in test_nccl_collectives.py and test_nccl_failures.py.

Needs ``pip install nccl4py "cuda-bindings~=13.0"`` (found to work: nccl4py 0.6.0, cuda-core 1.2.2, cuda-bindings
13.5.0, cuda-pathfinder 1.9.1; no nvidia-nccl wheel, no GPU). Skipped where they are missing.
"""

from __future__ import annotations

import ctypes
import importlib.util
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
from nccl.gpu_arrays import comes_true

from world import attempt, run, run_command, start


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# Not pytest.importorskip: a rank imports this file too, and loads the stand-ins before it imports nccl.
if not all(map(_is_installed, ("nccl.bindings.nccl", "cuda.core", "cuda.bindings"))):
    pytest.skip('needs pip install nccl4py "cuda-bindings~=13.0"', allow_module_level=True)

SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE = range(6)
SUM, MAX = 0, 2
INT32, FLOAT32 = 2, 7
GPUS = {"PROCGROUP_STAND_IN_GPUS": "4"}


class Rank:
    """One rank with a GPU, a stream, and a communicator of all ranks."""

    def __init__(self, rank: int, size: int, gpu: int | None = None) -> None:
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
        self.communicator = self.connect("world")

    def connect(self, name: str) -> Any:
        """Return a communicator of all ranks."""
        config = self.nccl.NCCLConfig()._to_lowpp()
        # In place of a store: what ncclGetUniqueId returns begins like this, and the port is the world's own.
        letters = f"procgroup-stand-in-{os.environ['MASTER_PORT']}-{name}".encode()
        unique_id = bytearray(letters.ljust(128, b"\0"))
        handle = self.bindings.comm_init_rank_config(self.size, unique_id, self.rank, config.ptr)
        return self.nccl.Communicator._from_comm(handle)

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

    def state_after(self, communicator: Any, timeout: float = 10) -> int:
        """Return the error of a communicator once it has one."""
        deadline = time.monotonic() + timeout
        while (state := int(communicator.get_async_error())) == SUCCESS:
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


class Caller(threading.Thread):
    """A call in a thread of its own, and its error."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.error: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.function()
        except Exception as error:
            self.error = error

    def ends_within(self, seconds: float) -> bool:
        self.join(seconds)
        return not self.is_alive()


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


def wait_for_a_dead_rank(rank: int, size: int) -> None:
    me = Rank(rank, size)
    buffer = me.upload(np.ones(10, "f4"))
    me.call("all_reduce", buffer, buffer, 10, FLOAT32, SUM)
    me.stream.sync()
    print("ready")
    if rank == size - 1:
        time.sleep(60)
    me.call("all_reduce", buffer, buffer, 10, FLOAT32, SUM)
    done = me.stream.record()
    time.sleep(0.3)  # for nothing to happen
    assert not done.is_done
    assert me.communicator.get_async_error() == SUCCESS
    me.communicator.abort()
    done.sync()


def test_a_death_leaves_the_others_waiting_until_an_abort() -> None:
    with start(wait_for_a_dead_rank, 3, environment=GPUS) as world:
        world.wait_for_output(2, "ready")
        world.kill(2)
        outcomes = world.wait(timeout=10)
    assert all(outcome.ok for outcome in outcomes[:2]), outcomes


MISMATCHES = {
    "count": [("all_reduce", 10, FLOAT32, SUM), ("all_reduce", 9, FLOAT32, SUM)],
    "empty": [("all_reduce", 10, FLOAT32, SUM), ("all_reduce", 0, FLOAT32, SUM)],
    "dtype": [("all_reduce", 10, FLOAT32, SUM), ("all_reduce", 10, INT32, SUM)],
    "op": [("all_reduce", 10, FLOAT32, SUM), ("all_reduce", 10, FLOAT32, MAX)],
    "root": [("broadcast", 10, FLOAT32, 0), ("broadcast", 10, FLOAT32, 1)],
    "operation": [("all_reduce", 10, FLOAT32, SUM), ("all_gather", 5, FLOAT32)],
}


def differ(rank: int, size: int) -> None:
    me = Rank(rank, size)
    buffer = me.upload(np.ones(20, "f4"))
    for name, calls in MISMATCHES.items():
        operation, *arguments = calls[rank]
        communicator = me.connect(name)
        me.call(operation, buffer, buffer, *arguments, communicator=communicator)
        assert me.state_after(communicator) == INVALID_USAGE, name
        assert re.search(r"Mismatch : rank \d is in \w+ of \d+ x", communicator.get_last_error()), name
        assert not me.stream.record().is_done or arguments[0] == 0  # which NCCL drops
        both_have_the_error = me.connect(f"{name} seen")
        communicator.abort()
        both_have_the_error.destroy()
        me.stream.sync()
    communicator = me.connect("message")
    if rank == 0:
        me.call("send", buffer, 10, FLOAT32, 1, communicator=communicator)
    else:
        me.call("recv", buffer, 8, FLOAT32, 0, communicator=communicator)
    assert me.state_after(communicator) == INVALID_USAGE
    assert "rank 1 is in Recv of 8 x float32, rank 0 is in Send of 10 x float32" in communicator.get_last_error()
    me.connect("message seen")
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
    twice = [Caller(lambda: (me.device.set_current(), me.connect("twice"))) for _ in range(2)]  # as rank 0, both
    assert comes_true(lambda: any(caller.error is not None for caller in twice))
    assert me.communicator.get_last_error() == "Bootstrap : rank 0 of 2 ranks has already checked in"
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
    assert done.stdout == "2.28.7 128 3\n", done.stderr


def call_first(rank: int, size: int) -> None:
    me = Rank(rank, size)
    buffer = me.upload(np.ones(10, "f4"))
    all_reduce = ("all_reduce", buffer, buffer, 10, FLOAT32, SUM)
    if rank == 1:
        time.sleep(0.5)
    begin = time.monotonic()
    me.call(*all_reduce)
    seconds = time.monotonic() - begin
    assert seconds > 0.3 if rank == 0 else seconds < 0.3
    if rank == 0:
        begin = time.monotonic()
        me.call(*all_reduce)  # for which rank 1 is late too
        assert time.monotonic() - begin < 0.3
    else:
        time.sleep(0.5)
        me.call(*all_reduce)
    assert (me.download(buffer, np.ones(10, "f4")) == size * size).all()

    pair = [me.connect(name) for name in ("one", "other")]
    streams = [me.device.create_stream() for _ in pair]
    with me.nccl.group():  # in another order on each rank
        for communicator, stream in list(zip(pair, streams, strict=True))[:: -1 if rank else 1]:
            me.call(*all_reduce, communicator=communicator, stream=stream)
    for stream in streams:
        stream.sync()
    lonely = me.connect("lonely")
    if rank == 0:
        call = Caller(lambda: me.call(*all_reduce, communicator=lonely))
        assert not call.ends_within(0.3)
        lonely.abort()
        assert call.ends_within(5)
        assert call.error.status == INTERNAL_ERROR  # type: ignore[union-attr]
        me.send_signal(1)
    else:
        me.receive_signal(0)
        lonely.abort()


def test_the_first_collective_blocks_until_all_ranks_are_in_it_or_an_abort() -> None:
    run(call_first, 2, environment=GPUS)


def abort_in_turn(rank: int, size: int) -> None:
    me = Rank(rank, size)
    buffer = me.upload(np.ones(10, "f4"))
    other = me.device.create_stream()
    all_reduce = ("all_reduce", buffer, buffer, 10, FLOAT32, SUM)
    several = [me.connect(f"number {number}") for number in range(6)]
    for one in several:
        me.call(*all_reduce, communicator=one)  # connects
    me.stream.sync()
    if rank == 1:
        return me.receive_signal(0)

    def is_known(communicator: Any) -> bool:
        try:
            me.bindings.comm_get_async_error(me.bindings.Comm(communicator))
        except me.bindings.NCCLError as error:
            assert error.status == INVALID_ARGUMENT
            return False
        return True

    def abort(communicator: Any) -> Caller:
        return Caller(lambda: me.bindings.comm_abort(communicator._comm))

    def stuck(communicator: Any, stream: Any) -> int:
        me.call(*all_reduce, communicator=communicator, stream=stream)  # rank 1 is not in it
        time.sleep(0.05)  # for the stream to begin it
        return int(communicator.ptr)

    first, second = several[0], several[1]
    stuck(first, me.stream), stuck(second, other)
    call = abort(first)
    assert not call.ends_within(0.3)  # for the kernel of the second
    assert abort(second).ends_within(5)
    assert call.ends_within(5)
    assert call.error is None

    first, second = several[2], several[3]
    handle = stuck(first, me.stream)
    stuck(second, other)
    begin = time.monotonic()
    me.nccl.group_start()
    me.bindings.comm_abort(first._comm)
    me.bindings.comm_abort(second._comm)
    me.nccl.group_end()
    assert time.monotonic() - begin < 2
    assert not is_known(handle)
    me.stream.sync()
    other.sync()

    with me.held():  # the kernel is behind what nobody opens yet
        me.call(*all_reduce, communicator=several[4])
        call = abort(several[4])
        assert not call.ends_within(0.3)
        assert abort(several[5]).ends_within(5)  # which has no operation there
    assert call.ends_within(5)
    return me.send_signal(1)


def test_an_abort_waits_for_every_kernel_on_the_gpu_and_a_group_aborts_all_together() -> None:
    run(abort_in_turn, 2, environment=GPUS)


def ask_in_a_group(rank: int, size: int) -> None:
    me = Rank(rank, size)
    buffer = me.upload(np.ones(10, "f4"))
    idle = me.connect("idle")
    calls = (me.bindings.comm_get_async_error, me.bindings.comm_finalize, me.bindings.comm_destroy)
    for name, call in zip(("GetAsyncError", "Finalize", "Destroy"), calls, strict=True):
        me.nccl.group_start()
        assert int(idle.get_async_error()) == SUCCESS
        me.call("all_reduce", buffer, buffer, 10, FLOAT32, SUM)
        assert int(idle.get_async_error()) == SUCCESS
        with me.refuses(INVALID_USAGE, f"Comm{name} : the communicator has operations in the open group"):
            call(me.communicator._comm)
        with me.refuses(INVALID_USAGE):
            me.nccl.group_end()
    assert int(me.communicator.get_async_error()) == SUCCESS
    assert (me.download(buffer, np.ones(10, "f4")) == 1).all()


def test_in_a_group_a_communicator_with_operations_is_not_asked_nor_ended() -> None:
    run(ask_in_a_group, 1)


class Pinned:
    """Some pinned words of the host."""

    def __init__(self, me: Rank, count: int = 4) -> None:
        status, self.address = me.driver.cuMemHostAlloc(4 * count, 1)
        assert status == 0
        self.words = np.frombuffer((ctypes.c_uint32 * count).from_address(int(self.address)), "u4")
        self.words[:] = 0

    def at(self, index: int) -> int:
        return int(self.address) + 4 * index


GEQ, EQ, AND, NOR = range(4)


def operate_on_memory(rank: int, size: int) -> None:
    me = Rank(rank, size)
    pinned = Pinned(me)
    stream = int(me.stream.handle)

    def wait(address: int, value: int, condition: int = GEQ) -> int:
        return int(me.driver.cuStreamWaitValue32(stream, address, value, condition)[0])

    def write(address: int, value: int) -> int:
        return int(me.driver.cuStreamWriteValue32(stream, address, value, 0)[0])

    last = 2**32 - 1
    cases = [
        (GEQ, 5, 4, (5, 6)),
        (GEQ, 1, last, (1, 2**31)),  # counts round
        (EQ, 7, 8, (7,)),
        (AND, 6, 8 + 1, (2, 4 + 1)),
        (NOR, 3, last - 1, (4, last - 8)),
    ]
    for condition, value, unmet, met in cases:
        for word in met:
            pinned.words[:] = unmet, 0, 0, 0
            assert wait(pinned.at(0), value, condition) == write(pinned.at(1), 9) == 0
            done = me.stream.record()
            time.sleep(0.01)  # for nothing to happen
            assert not done.is_done, (condition, unmet)
            assert pinned.words[1] == 0
            pinned.words[0] = word
            done.sync()
            assert pinned.words[1] == 9

    other = me.device.create_stream()  # a stream opens another, through device memory
    word = me.upload(np.zeros(1, "u4"))
    assert wait(int(word.handle), 3) == 0
    done = me.stream.record()
    assert not done.is_done
    assert me.driver.cuStreamWriteValue32(int(other.handle), int(word.handle), 3, 0)[0] == 0
    done.sync()

    pageable = np.zeros(4, "u4")
    for address in (0, pageable.ctypes.data, pinned.at(0) + 2, pinned.at(4)):
        assert wait(address, 1) == write(address, 1) == 1  # CUDA_ERROR_INVALID_VALUE
    me.stream.sync()


def use_what_native_code_needs(rank: int, size: int) -> None:
    """What the driver has besides, by the names under which it is looked up."""
    stand_ins.load()
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> int:
        function, status = ctypes.c_void_p(), ctypes.c_int()
        found = cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(function), 13000, ctypes.c_uint64(0), status)
        assert found == status.value == 0, name
        assert function.value
        return int(ctypes.CFUNCTYPE(ctypes.c_int, *map(type, arguments))(function.value)(*arguments))

    def pointer(value: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(value))

    contexts = [ctypes.c_void_p(), ctypes.c_void_p()]
    current = ctypes.c_void_p()

    def is_current(context: ctypes.c_void_p | None) -> bool:
        assert call("cuCtxGetCurrent", pointer(current)) == 0
        return current.value == (context.value if context else None)

    assert call("cuInit", ctypes.c_uint(0)) == 0
    for number, context in enumerate(contexts):
        assert call("cuDevicePrimaryCtxRetain", pointer(context), ctypes.c_int(number)) == 0
    assert call("cuCtxPopCurrent", pointer(current)) == 201  # CUDA_ERROR_INVALID_CONTEXT
    assert call("cuCtxPushCurrent", contexts[0]) == 0
    assert call("cuCtxPushCurrent", contexts[1]) == 0
    assert is_current(contexts[1])
    with_its_own = threading.Thread(target=lambda: found.append(is_current(None)))
    found: list[bool] = []
    with_its_own.start()
    with_its_own.join()
    assert found == [True]
    assert call("cuCtxPopCurrent", pointer(current)) == 0
    assert current.value == contexts[1].value
    assert is_current(contexts[0])
    assert call("cuCtxSetCurrent", contexts[1]) == 0  # in place of the top
    assert is_current(contexts[1])

    address, on_device, number = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_int(-1)
    assert call("cuMemHostAlloc", pointer(address), ctypes.c_size_t(64), ctypes.c_uint(3)) == 0
    assert call("cuMemHostGetDevicePointer", pointer(on_device), address, ctypes.c_uint(0)) == 0
    assert on_device.value == address.value
    for attribute, value in ((9, 1), (2, 1)):  # the device's number, and host memory
        assert call("cuPointerGetAttribute", pointer(number), ctypes.c_int(attribute), address) == 0
        assert number.value == value
    assert call("cuMemFreeHost", address) == 0
    assert call("cuMemHostGetDevicePointer", pointer(on_device), address, ctypes.c_uint(0)) == 1

    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    assert call("cuThreadExchangeStreamCaptureMode", pointer(mode)) == 0
    assert mode.value == 0
    assert call("cuThreadExchangeStreamCaptureMode", pointer(mode)) == 0
    assert mode.value == 2


def lack_memory_operations(rank: int, size: int) -> list[int]:
    me = Rank(rank, size)
    pinned = Pinned(me)
    operations = (me.driver.cuStreamWaitValue32, me.driver.cuStreamWriteValue32)
    return [int(operation(int(me.stream.handle), pinned.at(0), 1, 0)[0]) for operation in operations]


def test_a_stream_waits_for_and_writes_words_of_memory() -> None:
    run(operate_on_memory, 1)


def test_native_code_finds_contexts_and_pinned_memory_by_name() -> None:
    run(use_what_native_code_needs, 1, environment=GPUS)


def test_streams_have_no_memory_operations_on_request() -> None:
    environment = {"PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS": "1"}
    assert run(lack_memory_operations, 1, environment=environment) == [[801, 801]]


def record_again(rank: int, size: int) -> tuple[int, int, int]:
    """Return what a recording that is in order gives, one that is too early, and a call after it."""
    me = Rank(rank, size)
    _, event = me.driver.cuEventCreate(0)
    stream = int(me.stream.handle)

    def record() -> int:
        return int(me.driver.cuEventRecord(event, stream)[0])

    pinned = Pinned(me)
    record()
    me.stream.sync()
    me.driver.cuStreamWaitValue32(stream, pinned.at(0), 1, GEQ)
    in_order, too_early = record(), record()
    after = int(me.driver.cuEventQuery(event)[0])
    pinned.words[0] = 1
    return in_order, too_early, after


def test_an_event_that_is_recorded_again_too_early_is_a_fault_on_request() -> None:
    assert run(record_again, 1) == [(0, 0, 600)]  # CUDA_ERROR_NOT_READY
    (outcome,) = attempt(record_again, 1, environment={"PROCGROUP_STAND_IN_STRICT_EVENTS": "1"})
    assert outcome.value == (0, 700, 700)  # CUDA_ERROR_ILLEGAL_ADDRESS
    assert "cuEventRecord on an event whose last recording is not reached yet" in outcome.output


def work_in_bursts(rank: int, size: int) -> None:
    me = Rank(rank, size)
    pinned = Pinned(me, 8)
    seconds = 0.2
    for _ in range(3):
        pinned.words[:] = 0
        time.sleep(max(0.0, seconds * (time.monotonic() // seconds + 1) - time.monotonic()) + 0.02)
        begin = time.monotonic()
        for index in range(8):
            me.driver.cuStreamWriteValue32(int(me.stream.handle), pinned.at(index), 1, 0)
        if time.monotonic() % seconds < 0.1:  # unless this process was held up
            assert pinned.words.sum() == 0
        me.stream.sync()
        assert pinned.words.sum() == 8
        assert time.monotonic() // seconds > begin // seconds
        if begin % seconds < 0.1:
            assert time.monotonic() - begin < 2 * seconds  # one burst, not one for each


def test_a_stream_begins_its_work_in_bursts_on_request() -> None:
    run(work_in_bursts, 1, environment={"PROCGROUP_STAND_IN_BURST_US": "200000"})


def share_channels(rank: int, size: int) -> list[bool]:
    """Return which streams run while the first one waits: of its priority, and one of another."""
    me = Rank(rank, size)
    pinned = Pinned(me)
    options = [0] * 5 + [-1]
    streams = [int(me.driver.cuStreamCreateWithPriority(1, priority)[1]) for priority in options]
    me.driver.cuStreamWaitValue32(streams[0], pinned.at(0), 1, 0)
    for stream in streams[1:]:
        me.driver.cuStreamWriteValue32(stream, pinned.at(1), 1, 0)
    time.sleep(0.2)
    has_run = [int(me.driver.cuStreamQuery(stream)[0]) == 0 for stream in streams]
    pinned.words[0] = 1
    for stream in streams:
        assert me.driver.cuStreamSynchronize(stream)[0] == 0
    return has_run


def test_streams_of_one_priority_share_channels_on_request() -> None:
    assert run(share_channels, 1) == [[False] + [True] * 5]
    shared = run(share_channels, 1, environment={"PROCGROUP_STAND_IN_CHANNELS": "2"})
    assert shared == [[False, True, False, True, False, True]]


def abort_before_the_kernel(rank: int, size: int) -> list[float]:
    me = Rank(rank, size)
    values = np.ones(20, "f4")
    received, sent = me.upload(values), me.upload(values)
    with me.held():
        me.call("all_reduce", sent, received, 20, FLOAT32, SUM)
        call = Caller(lambda: me.bindings.comm_abort(me.communicator._comm))
        assert not call.ends_within(0.2)
    assert call.ends_within(5)
    assert (me.download(sent, values) == 1).all()
    return me.download(received, values).view("u1").tolist()


def test_a_kernel_that_begins_after_an_abort_spoils_its_buffer_on_request() -> None:
    untouched = np.ones(20, "f4").view("u1").tolist()
    assert run(abort_before_the_kernel, 2, environment=GPUS) == [untouched] * 2
    environment = {**GPUS, "PROCGROUP_STAND_IN_NCCL_LATE_ABORT": "1"}
    assert run(abort_before_the_kernel, 2, environment=environment) == [[0xEE] * 64 + untouched[64:]] * 2
