"""A stand-in for a device with streams, so that staging is tested where there is none.

Its tensors are in CPU memory, but report another device. What changes them is a *job* of a stream: streams are threads,
which take up each job late. To read a tensor waits for the current stream only, as on a GPU: so a wait that is missing
anywhere shows as wrong numbers. New tensors hold 77s until the job that gives them their values.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

KIND = "privateuseone"
LATEST = 0.003
"""Seconds by which a job is late at most."""

_FACTORIES = {torch.ones, torch.zeros, torch.full, torch.arange, torch.tensor}
_NO_KERNELS = frozenset(
    """__get__ __getitem__ data_ptr detach dim element_size empty_like is_complex is_contiguous is_floating_point narrow
    numel requires_grad_ size split storage_offset stride t transpose unbind view""".split()  # noqa: SIM905
)
_here = threading.local()


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def give(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def wait_event(self, event: Event) -> None:
        mark = event.mark
        if mark is not None:
            self.give(lambda: mark.wait(60))

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        assert event.mark is not None and event.mark.wait(60), "a stream of the stand-in hangs"

    def _work(self) -> None:
        lateness = random.Random(0)
        while True:
            job = self._jobs.get()
            time.sleep(lateness.uniform(0, LATEST))
            with torch.inference_mode():
                job()


class Event:
    mark: threading.Event | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.mark = threading.Event()
        (stream or current_stream()).give(self.mark.set)

    def query(self) -> bool:
        return self.mark is None or self.mark.is_set()


_default: list[Stream] = []


def current_stream(device: Any = None) -> Stream:
    if not _default:
        _default.append(Stream())
    return getattr(_here, "stream", _default[0])


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before = current_stream()
    _here.stream = chosen
    try:
        yield
    finally:
        _here.stream = before


def device(index: int = 0) -> Any:
    return torch.device(KIND, index)


unrecorded: set[tuple[int, Stream]] = set()
"""Memory that was used on a stream other than the default one, which was not told so."""


def require_recorded() -> None:
    """Raise AssertionError where memory stays unrecorded.

    The thread that completes a call copies its result first and records the memory then. Where nobody waits for the
    call, it may be between the two still.
    """
    deadline = time.monotonic() + 40
    while unrecorded and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not unrecorded


class DeviceTensor(torch.Tensor):
    index = 0

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def device(self) -> Any:
        return device(self.index)

    def record_stream(self, used: Stream) -> None:
        unrecorded.discard((_plain(self).untyped_storage().data_ptr(), used))

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, arguments: Any = (), named: Any = None) -> Any:
        name, named = function.__name__, dict(named or {})
        if name == "cpu":
            current_stream().synchronize()
            return _plain(arguments[0]).clone()
        if name.endswith("_") and not name.startswith("__") and name not in _NO_KERNELS:
            waits = name == "copy_" and not named.pop("non_blocking", False)
            _launch(function, arguments, named)
            if waits:
                current_stream().synchronize()
            return arguments[0]
        if name not in _NO_KERNELS:
            current_stream().synchronize()
        return super().__torch_function__(function, kinds, arguments, named)


def _plain(value: Any) -> Any:
    if not isinstance(value, DeviceTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(torch.Tensor)


def _launch(kernel: Any, arguments: Any, named: Any) -> None:
    here = current_stream()
    plain = tree_map(_plain, arguments)
    if here is not _default[0]:
        for given, memory in zip(arguments, plain, strict=True):
            if isinstance(given, DeviceTensor) and memory.numel():
                unrecorded.add((memory.untyped_storage().data_ptr(), here))
    here.give(lambda: kernel(*plain, **named))


def on_device(values: torch.Tensor) -> DeviceTensor:
    """Return a tensor of the device that will have these values once the current stream has come to it."""
    with torch._C.DisableTorchFunctionSubclass():
        memory = torch.empty_like(values).fill_(77)
        made = memory.as_subclass(DeviceTensor)
    current_stream().give(lambda: memory.copy_(values))
    return made


class NewTensorsOnDevice(TorchFunctionMode):
    """Inside of it, torch makes tensors on the device unless a device is named."""

    def __torch_function__(self, function: Any, kinds: Any, arguments: Any = (), named: Any = None) -> Any:
        made = function(*arguments, **(named or {}))
        return on_device(made) if function in _FACTORIES and "device" not in (named or {}) else made


def register() -> None:
    """Let torch know the device."""
    module = SimpleNamespace(Stream=Stream, Event=Event, current_stream=current_stream, stream=stream)
    module.device = lambda _: contextlib.nullcontext()
    torch._register_device_module(KIND, module)
    # For subclasses of Tensor torch.distributed would leave what follows to them, without what makes them special.
    distributed_c10d.has_torch_function = lambda _: False
