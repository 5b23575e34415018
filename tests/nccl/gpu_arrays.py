"""Arrays in the memory of the stand-in GPUs, which a program passes to procgroup as it passes those of CuPy and Numba.

A rank calls `start` before anything else of this file, and before it imports nccl or cuda::

    gpu_arrays.start()
    array = GpuArray.of(np.ones(3), stream=new_stream())
    dist.all_reduce(array)
    assert (array.get() == size).all()

A *stream* is a number, as the CUDA array interface has it: `LEGACY` (1) is the legacy default stream, `PER_THREAD` (2)
the default stream of the thread, a larger one a handle of `new_stream`. None means that no synchronisation is needed.

The memory of an array is freed with the last reference to it, and its free waits for no stream: an operation that comes
to the memory later is an error ("illegal address"), as with the memory pool of CuPy it is a wrong result.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from nccl import stand_ins

LEGACY, PER_THREAD = 1, 2
_NON_BLOCKING = 1
_SUCCESS, _NOT_READY = 0, 600


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


_NEEDED = ("nccl.bindings.nccl", "cuda.core", "cuda.bindings")
MISSING = "" if all(map(_is_installed, _NEEDED)) else 'needs pip install nccl4py "cuda-bindings~=13.0"'
"""What this machine lacks for tests with GPU arrays; "" where it lacks nothing."""


def start(gpu: int | None = None) -> None:
    """Load the stand-ins, and make a GPU current in this thread: by default the one with the local rank's number."""
    stand_ins.load()
    _call("cuInit", 0)
    _Home.gpu = int(os.environ["LOCAL_RANK"]) if gpu is None else gpu
    _make_current(_Home.gpu)


class _Home:
    gpu = 0
    """The GPU of what names none, in all threads of this process."""


def new_stream(device: int | None = None) -> int:
    """Make a stream that does not synchronise with the legacy default stream."""
    with _on(_Home.gpu if device is None else device):
        return int(_call("cuStreamCreateWithPriority", _NON_BLOCKING, 0))


def is_idle(stream: int) -> bool:
    """Return whether all that was queued on a stream has completed."""
    from cuda.bindings import driver

    with _on(_Home.gpu):
        (status,) = driver.cuStreamQuery(stream)
    assert status in (_SUCCESS, _NOT_READY), status
    return int(status) == _SUCCESS


def synchronize() -> None:
    """Wait for all that was queued on this process's GPU."""
    with _on(_Home.gpu):
        _call("cuCtxSynchronize")


@contextmanager
def held(stream: int) -> Iterator[None]:
    """Let a stream begin no work that the body queues on it before the end of the body."""
    from cuda.bindings import driver

    gate, passed = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        gate.wait(20)
        passed.set()

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(wait)
    function = driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
    with _on(_Home.gpu):
        _call("cuLaunchHostFunc", stream, function, 0)
        after = _call("cuEventCreate", 0)
        _call("cuEventRecord", after, stream)
    try:
        yield
    finally:
        gate.set()
        _call("cuEventSynchronize", after)  # the callback must not be freed before
    assert passed.is_set()


class Graph:
    """What was queued on a stream while it was captured; `launch` runs it, as often as one likes."""

    _made: Any = None

    def launch(self, stream: int) -> None:
        with _on(_Home.gpu):
            _call("cuGraphLaunch", self._made, stream)

    def destroy(self) -> None:
        with _on(_Home.gpu):
            _call("cuGraphExecDestroy", self._made)


@contextmanager
def captured(stream: int) -> Iterator[Graph]:
    """Capture what the body queues on a stream, as torch.cuda.graph does; the graph is made at the end of the body."""
    from cuda.bindings import driver

    graph = Graph()
    with _on(_Home.gpu):
        _call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        try:
            yield graph
        except BaseException:
            driver.cuStreamEndCapture(stream)
            raise
        taken = _call("cuStreamEndCapture", stream)
        graph._made = _call("cuGraphInstantiate", taken, 0)
        _call("cuGraphDestroy", taken)


def await_frees() -> None:
    """Wait until the memory of dropped arrays has been freed."""
    with _on(_Home.gpu):
        _call("cuStreamSynchronize", _stream_of_frees(_Home.gpu))


def comes_true(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Wait until a condition holds; return whether it did in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


class GpuArray:
    """An array in the memory of one GPU, used on one stream; the attribute ``stream`` may be changed at any time."""

    def __init__(
        self, shape: Sequence[int], dtype: Any, *, stream: int | None = LEGACY, device: int | None = None
    ) -> None:
        self.shape, self.dtype, self.stream = tuple(shape), np.dtype(dtype), stream
        self.device = _Home.gpu if device is None else device
        self.strides: tuple[int, ...] | None = None
        self.is_readonly = False
        self._memory = _Memory(self.size * self.dtype.itemsize, self.device)
        self._begin = 0  # bytes into the memory

    @classmethod
    def of(cls, array: np.ndarray, *, stream: int | None = LEGACY, device: int | None = None) -> GpuArray:
        """Return an array with these elements, whose copy to the GPU is queued on the stream."""
        made = cls(array.shape, array.dtype, stream=stream, device=device)
        made.set(array)
        return made

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self._address, self.is_readonly),
            "strides": self.strides,
            "stream": self.stream,
            "version": 3,
        }

    def set(self, array: np.ndarray) -> None:
        """Queue a copy of these elements, as they are now, on the stream."""
        elements = np.ascontiguousarray(array, self.dtype)
        assert elements.size == self.size
        self._copy("cuMemcpyHtoDAsync", self._address, elements.ctypes.data, elements.nbytes)
        if self.stream is None:
            self._synchronize()
            return
        with _on(self.device):  # the array may be dropped before the copy, if a call refuses it
            copied = _call("cuEventCreate", 0)
            _call("cuEventRecord", copied, self.stream)
            _call("cuStreamWaitEvent", _stream_of_frees(self.device), copied, 0)
            _call("cuEventDestroy", copied)

    def get(self) -> np.ndarray:
        """Return the elements as they are after the stream's work, or after the GPU's work where there is no stream."""
        elements = np.empty(self.shape, self.dtype)
        if self.stream is None:
            self._synchronize()
        self._copy("cuMemcpyDtoHAsync", elements.ctypes.data, self._address, elements.nbytes)
        self._synchronize()
        return elements

    def readonly(self) -> GpuArray:
        """Return a view that may not be written."""
        view = copy.copy(self)
        view.is_readonly = True
        return view

    def strided(self) -> GpuArray:
        """Return a view of every second element of an array with one dimension."""
        view = copy.copy(self)
        view.shape, view.strides = (self.size // 2,), (2 * self.dtype.itemsize,)
        return view

    def parts(self, number: int) -> list[GpuArray]:
        """Return views of equal parts of an array with one dimension."""
        views = [copy.copy(self) for _ in range(number)]
        for place, view in enumerate(views):
            view.shape = (self.size // number,)
            view._begin = place * view.size * self.dtype.itemsize
        return views

    @property
    def _address(self) -> int:
        return self._memory.address + self._begin

    def transposed(self) -> GpuArray:
        """Return a view of an array with two dimensions whose dimensions are exchanged."""
        rows, columns = self.shape
        view = copy.copy(self)
        view.shape, view.strides = (columns, rows), (self.dtype.itemsize, columns * self.dtype.itemsize)
        return view

    def _copy(self, name: str, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            with _on(self.device):
                _call(name, target, source, nbytes, LEGACY if self.stream is None else self.stream)

    def _synchronize(self) -> None:
        with _on(self.device):
            if self.stream is None:
                _call("cuCtxSynchronize")
            else:
                _call("cuStreamSynchronize", self.stream)


class _Memory:
    """Memory of one GPU; without bytes its address is 0, as the CUDA array interface asks for."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.address = 0
        if nbytes:
            with _on(device):
                self.address = int(_call("cuMemAlloc", nbytes))
            weakref.finalize(self, _call, "cuMemFreeAsync", self.address, _stream_of_frees(device)).atexit = False


@cache
def _stream_of_frees(device: int) -> int:
    return new_stream(device)


@contextmanager
def _on(device: int) -> Iterator[None]:
    """Make a GPU current in this thread, and the one before it afterwards."""
    before = _call("cuCtxGetCurrent")
    _make_current(device)
    try:
        yield
    finally:
        _call("cuCtxSetCurrent", before)


def _make_current(device: int) -> None:
    _call("cuCtxSetCurrent", _call("cuDevicePrimaryCtxRetain", device))


def _call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver; return what it gives, and raise its error."""
    from cuda.bindings import driver

    status, *values = getattr(driver, name)(*arguments)
    if status != _SUCCESS:
        raise RuntimeError(f"{name}: {status.name}")
    return values[0] if values else None
