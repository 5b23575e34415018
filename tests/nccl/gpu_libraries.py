"""The array libraries of programs on a GPU, in one form: how each makes arrays, uses streams and keeps the GPU busy.

All ranks use GPU 0. A program gets one of these objects and calls nothing of the libraries itself::

    library = LIBRARIES["cupy"]()
    with library.using(stream := library.new_stream()):
        array = library.of(np.ones(3))
        library.keep_busy(0.3)          # what is queued from now on runs later
        library.fill(array, 2)
        dist.all_reduce(array)
        assert (library.get(array) == 2 * size).all()

Here a real GPU is used, unless PROCGROUP_STAND_IN_GPUS is set: then the stand-ins of libcuda and libnccl, for which
only "driver" is a library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from nccl import gpu_arrays, stand_ins
from nccl.gpu_arrays import LEGACY, GpuArray

from oracle import Array

IS_STAND_IN = "PROCGROUP_STAND_IN_GPUS" in os.environ

SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < (unsigned long long)nanoseconds);
}
"""
"""A kernel that runs for a given time."""


def missing() -> str:
    """Return why there is no GPU for tests; "" where there is one."""
    if gpu_arrays.MISSING or IS_STAND_IN:
        return gpu_arrays.MISSING
    from cuda.bindings import driver

    try:
        error, *_ = driver.cuInit(0)
        if int(error):
            return f"no GPU: cuInit gives {error.name}"
        _, count = driver.cuDeviceGetCount()
    except RuntimeError as error:
        return f"no driver: {error}"
    return "" if count else "no GPU"


def lacks(library: str) -> str:
    """Return why the arrays of a library cannot be tested here; "" where they can."""
    if library == "driver":
        return ""
    return "" if importlib.util.find_spec(library) is not None else f"{library} is not installed"


class PoolMemory:
    """Memory of one GPU whose free waits for a stream: on a real GPU that is so for memory of a pool only."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.address = 0
        if nbytes:
            with gpu_arrays._on(device):
                stream = gpu_arrays._stream_of_frees(device)
                self.address = int(gpu_arrays._call("cuMemAllocAsync", nbytes, stream))
                gpu_arrays._call("cuStreamSynchronize", stream)
            weakref.finalize(self, _free, self.address, stream, device).atexit = False


def _free(address: int, stream: int, device: int) -> None:
    with gpu_arrays._on(device):  # any thread may drop the last reference
        gpu_arrays._call("cuMemFreeAsync", address, stream)


def use_real_gpus() -> None:
    """Let ``gpu_arrays`` use the real libraries in this process, unless the stand-ins are asked for."""
    if IS_STAND_IN:
        return
    stand_ins.load = lambda: None
    gpu_arrays._Memory = PoolMemory  # type: ignore[misc, assignment]


class Driver:
    """Arrays of gpu_arrays.py: plain memory of the driver, each used on one stream."""

    dtypes: tuple[str, ...] = ()
    unsupported: frozenset[str] = frozenset()
    """Of ``dtypes``, those that the library turns out not to have."""

    def __init__(self) -> None:
        use_real_gpus()
        gpu_arrays.start(0)
        self._stream: int = LEGACY
        self._kept: list[Any] = []

    def of(self, elements: Array) -> Any:
        """Return an array with these elements on the current stream."""
        return GpuArray.of(elements, stream=self._stream)

    def get(self, array: Any) -> Array:
        """Return the elements as they are on the current stream, which may not be the one of the array's making."""
        array.stream = self._stream
        return np.asarray(array.get())

    def doubled(self, array: Any) -> Array:
        """Return twice the elements, computed on the current stream without a wait of the host before."""
        return 2 * self.get(array)

    def fill(self, array: Any, value: float) -> None:
        """Queue that all elements become this value."""
        elements = np.full(array.shape, value, array.dtype)
        if IS_STAND_IN or array.dtype != np.float32:
            array.set(elements)
            return
        with gpu_arrays._on(0):  # a copy from memory that is not pinned would let the host wait for the stream
            bits = int(elements[:1].view(np.uint32)[0])
            gpu_arrays._call("cuMemsetD32Async", array._address, bits, array.size, array.stream)

    def half(self, array: Any) -> Any:
        """Return every second element of an array with one dimension."""
        return array.strided()

    def new_stream(self) -> Any:
        """Return a stream that does not synchronise with the legacy default stream."""
        return gpu_arrays.new_stream()

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Make a stream the current one. (Arrays that were made on another one keep that: see `get`.)"""
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def move_to_current_stream(self, array: Any) -> None:
        """Use an array on the current stream from now on; other libraries always do."""
        array.stream = self._stream

    def keep_busy(self, seconds: float) -> None:
        """Let what is queued on the current stream from now on begin no earlier than in so many seconds."""
        from cuda.bindings import driver

        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(seconds))
        self._kept.append(callback)
        function = driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
        with gpu_arrays._on(0):
            gpu_arrays._call("cuLaunchHostFunc", self._stream, function, 0)

    def synchronize(self) -> None:
        """Wait for all that was queued on the GPU."""
        with gpu_arrays._on(0):
            gpu_arrays._call("cuCtxSynchronize")


class Cupy:
    """CuPy's arrays, which say on which stream they are used by the CUDA array interface."""

    unsupported: frozenset[str] = frozenset()
    dtypes = ("bool", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32")
    dtypes += ("float64", "complex64", "complex128")

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        cupy.cuda.Device(0).use()
        self._spin = cupy.RawKernel(SPIN, "spin")
        warm = cupy.ones(4, np.float32)  # kernels are compiled at their first use
        warm.fill(2)
        cupy.asnumpy(warm * 2)
        self.keep_busy(0.001)
        cupy.cuda.Device(0).synchronize()
        try:
            bfloat16 = self.of(np.ones(2, ml_dtypes.bfloat16))
            assert self.get(bfloat16).tolist() == [1, 1] and str(bfloat16.dtype) == "bfloat16"
        except Exception as error:  # an older CuPy
            print(f"CuPy {cupy.__version__} has no bfloat16: {type(error).__name__}: {error}")
            self.unsupported = frozenset(["bfloat16"])

    def of(self, elements: Array) -> Any:
        return self.cupy.asarray(np.ascontiguousarray(elements).reshape(elements.shape))

    def get(self, array: Any) -> Array:
        return np.asarray(self.cupy.asnumpy(array))

    def doubled(self, array: Any) -> Array:
        return self.get(array * 2)

    def fill(self, array: Any, value: float) -> None:
        array.fill(value)

    def half(self, array: Any) -> Any:
        return array[::2]

    def new_stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        entered: AbstractContextManager[Any] = stream
        return entered

    def move_to_current_stream(self, array: Any) -> None: ...

    def keep_busy(self, seconds: float) -> None:
        self._spin((1,), (1,), (np.int64(seconds * 1e9),))

    def synchronize(self) -> None:
        self.cupy.cuda.Device(0).synchronize()


class Torch:
    """torch's CUDA tensors, which are used on torch's current stream."""

    unsupported: frozenset[str] = frozenset()
    dtypes = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    dtypes += ("complex64", "complex128", "float8_e4m3fn", "float8_e5m2")
    device = os.environ.get("PROCGROUP_TEST_TORCH_DEVICE", "cuda")
    """"cpu" is for trying the tests themselves, where there is no GPU."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        if self.device == "cuda":
            torch.cuda.set_device(0)
        warm = torch.ones(4, device=self.device)
        warm.fill_(2)
        (warm * 2).cpu()
        self.keep_busy(0.001)
        self.synchronize()

    def of(self, elements: Array) -> Any:
        host = np.array(elements)  # writable, in C order
        name = host.dtype.name
        if name == "bfloat16" or name.startswith("float8"):
            bits = self.torch.from_numpy(host.view("i2" if name == "bfloat16" else "u1"))
            return bits.to(self.device).view(getattr(self.torch, name))
        return self.torch.from_numpy(host).to(self.device)

    def get(self, array: Any) -> Array:
        name = str(array.dtype).removeprefix("torch.")
        if name == "bfloat16" or name.startswith("float8"):
            bits = array.view(self.torch.int16 if name == "bfloat16" else self.torch.uint8)
            return np.asarray(bits.cpu().numpy().view(getattr(ml_dtypes, name)))
        return np.asarray(array.detach().cpu().numpy())

    def doubled(self, array: Any) -> Array:
        return self.get(array * 2)

    def fill(self, array: Any, value: float) -> None:
        array.fill_(value)

    def half(self, array: Any) -> Any:
        return array[::2]

    def new_stream(self) -> Any:
        return self.torch.cuda.Stream() if self.device == "cuda" else None

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        with self.torch.cuda.stream(stream):
            yield

    def move_to_current_stream(self, array: Any) -> None: ...

    def keep_busy(self, seconds: float) -> None:
        if self.device == "cuda":
            self.torch.cuda._sleep(int(seconds * 2.0e9))  # cycles; these GPUs have at most 1.98 GHz

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


LIBRARIES: dict[str, Callable[[], Any]] = {"driver": Driver, "cupy": Cupy, "torch": Torch}
