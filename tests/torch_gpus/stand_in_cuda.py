"""What stands in for torch.cuda, by torch's registries; imported when torch_device.cpp has been loaded."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch_gpus import batch_norm_kernels

_CUDA = 1  # c10::DeviceType


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **handles: Any) -> Any:
        if "stream_id" in handles:
            return super().__new__(cls, **handles)
        return super().__new__(cls, device=torch.device("cuda", _index_of(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return int(self.stream_id)


class ExternalStream(Stream):
    def __new__(cls, stream_ptr: int, device: Any = None, **_: Any) -> Any:
        return _stream_of(stream_ptr, _index_of(device), cls)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Any:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        super().record(stream or current_stream())

    def wait(self, stream: Any = None) -> None:
        (stream or current_stream()).wait_event(self)


def _stream_of(handle: int, index: int, kind: type[Stream] = Stream) -> Any:
    return torch.Stream.__new__(kind, stream_id=handle, device_index=index, device_type=_CUDA)


def _index_of(device: Any) -> int:
    index = torch.cuda._utils._get_device_index(device, optional=True)
    return current_device() if index < 0 else int(index)


def current_device() -> int:
    return int(torch._C._accelerator_getDeviceIndex())


def set_device(device: Any) -> None:
    index = torch.cuda._utils._get_device_index(device)
    if index >= 0:
        torch._C._accelerator_setDeviceIndex(index)


def current_stream(device: Any = None) -> Any:
    index = _index_of(device)
    return _stream_of(torch._C._accelerator_getStream(index).stream_id, index)


def default_stream(device: Any = None) -> Any:
    return _stream_of(0, _index_of(device))


def set_stream(stream: Any) -> None:
    if stream is not None:
        torch._C._accelerator_setStream(stream)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index_of(device))


@functools.cache
def device_count() -> int:
    count = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    return count.value


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _sleep_for(nanoseconds: int | None) -> None:
    time.sleep((nanoseconds or 0) / 1e9)


def _sleep(cycles: int) -> None:
    """Let the current stream do nothing for so many cycles, of a nanosecond each."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchHostFunc(ctypes.c_void_p(current_stream().cuda_stream), _sleep_for, ctypes.c_void_p(cycles))


def get_device_properties(device: Any = None) -> Any:
    return SimpleNamespace(name="stand-in GPU", major=9, minor=0, total_memory=1 << 34, multi_processor_count=1)


_CAPTURE_MODES = ("global", "thread_local", "relaxed")


class CUDAGraph:
    """Each graph has a pool of memory of its own: a shared one is another's, which nothing reuses."""

    _number: int | None = None
    _pool: Any = None

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        self.reset()
        self._pool = pool or graph_pool_handle()
        self._number = torch.ops.stand_in.begin_capture(_CAPTURE_MODES.index(capture_error_mode))

    def capture_end(self) -> None:
        torch.ops.stand_in.end_capture(self._number)

    def replay(self) -> None:
        if self._number is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        torch.ops.stand_in.replay(self._number)

    def reset(self) -> None:
        number, self._number = self._number, None
        if number is not None:
            torch.ops.stand_in.reset(number)

    def pool(self) -> Any:
        return self._pool

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.reset()


_pools = itertools.count(1)


def graph_pool_handle() -> Any:
    return (0, next(_pools))


def is_current_stream_capturing() -> bool:
    return bool(current_stream().is_capturing())


def _bytes_of(storage: Any) -> Any:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Storage:
    """Methods of torch.UntypedStorage that a torch without CUDA has for the host alone."""

    def resize_(self, size: int) -> Any:
        if self.device.type == "cpu":  # type: ignore[attr-defined]
            return _resize(self, size)
        torch.ops.stand_in.set_bytes(_bytes_of(self), int(size))
        return self

    def copy_(self, source: Any, non_blocking: bool | None = None) -> Any:
        _bytes_of(self).copy_(_bytes_of(source))
        return self

    def clone(self) -> Any:
        return _bytes_of(self).clone().untyped_storage()

    def to(self, *, device: Any, non_blocking: bool = False) -> Any:
        return _bytes_of(self).to(device).untyped_storage()

    def cpu(self) -> Any:
        return _bytes_of(self).cpu().untyped_storage()

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Any:
        return _bytes_of(self).cuda(device).untyped_storage()


_resize = torch.UntypedStorage.resize_


def install() -> None:
    """Put all of this in the place of torch's own functions, which need a build with CUDA."""
    cuda = torch.cuda
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_initialized": True,
        "_exchange_device": torch._C._accelerator_exchangeDevice,
        "_maybe_exchange_device": torch._C._accelerator_maybeExchangeDevice,
        "get_device_name": lambda device=None: "stand-in GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "empty_cache": lambda: None,
    }
    own = (Stream, ExternalStream, Event, current_device, set_device, current_stream, default_stream, set_stream)
    graphs = (CUDAGraph, graph_pool_handle, is_current_stream_capturing)
    for function in (*own, *graphs, synchronize, device_count, get_device_properties, _sleep):
        replaced[function.__name__] = function
    for name, value in replaced.items():
        setattr(cuda, name, value)
    for kind in (Stream, Event, ExternalStream):
        setattr(cuda.streams, kind.__name__, kind)
    for each in graphs:
        setattr(cuda.graphs, each.__name__, each)
    torch._C._host_emptyCache = lambda: None
    for name in ("resize_", "copy_", "clone", "to", "cpu", "cuda"):
        setattr(torch.UntypedStorage, name, getattr(_Storage, name))
    batch_norm_kernels.register()
    torch.cuda.nccl.version = lambda: (2, 28, 7)
    torch.backends.cuda.is_built = lambda: True
    torch.is_on_stand_in_gpus = True
