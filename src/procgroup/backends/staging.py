"""Copy arrays on a CUDA device to host memory and back, for calls of groups whose transport moves host memory.

::

    caller's stream     kernels (ready)                                    let_streams_wait  kernels
    stream in                      copies what is read (copied)           /
    transport                                           the call         /
    stream out                                                  copies what is written (back)

The ranks match calls by their order: a call keeps its place, and is not begun before it has been copied. A send waits
for that where it is made. The host memory is the process's own, which the other ranks of the host can read, and is
registered with the device (pinned), so that copies run beside the program.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Mapping, Sequence
from ctypes import addressof, c_char
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from procgroup.arrays import cuda_array
from procgroup.backends import cuda
from procgroup.errors import DistBackendError
from procgroup.groups.backend import Span

_ALIGNMENT = 64
_SMALLEST = 1 << 16
_MOST_FREE = 1 << 28
"""How many bytes of host memory of one device are kept for later calls."""
_PAUSE_SECONDS = 0.00005


@cache
def is_available() -> bool:
    """Return whether this process can copy from and to CUDA devices: whether NVIDIA's cuda-bindings are installed."""
    try:
        return find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False


class StagedCall:
    """The copies of one call."""

    def __init__(
        self, device: int, inputs: Sequence[Span], outputs: Sequence[Span], arrays: Sequence[Any], seconds: float
    ) -> None:
        self._staging = _staging(device)
        self._gpu = self._staging.gpu
        self._arrays = arrays
        self._seconds = seconds
        self._back: Any = None
        spans = list(dict.fromkeys((*inputs, *outputs)))
        places, total = [], 0
        for _, nbytes in spans:
            places.append(total)
            total += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._gpu.current():
            self._memory = self._staging.take(total)
            hosts = {span: self._memory.address + place for span, place in zip(spans, places, strict=True)}
            self._copied = self._copy_in({span: hosts[span] for span in inputs})
        self.inputs: list[int] = [hosts[span] for span in inputs]
        """The address of the host memory of each block that the call reads."""
        self.outputs: list[int] = [hosts[span] for span in outputs]
        """And of each that it writes."""
        self._written = {span: hosts[span] for span in outputs}

    def _copy_in(self, read: Mapping[Span, int]) -> Any:
        """Queue the copies, behind what is queued on the arrays' streams; return the event of their end."""
        for stream in cuda_array.current_streams(self._arrays):
            ready = self._gpu.record(stream)
            cuda.let_wait(self._staging.stream_in, ready)
            cuda.let_wait(self._staging.stream_out, ready)
            self._gpu.give_back(ready)
        for span, host in read.items():
            if span[1]:
                cuda.copy(self._staging.stream_in, host, *span)
        return self._gpu.record(self._staging.stream_in)

    def is_copied(self) -> bool:
        """Return whether what the call reads is in host memory."""
        return cuda.has_come(self._copied)

    def wait_until_copied(self) -> None:
        """Wait for that. Raises DistBackendError after the time of the call."""
        self._wait_for(self._copied, "what was queued before the array is to be sent")

    def copy_back(self) -> None:
        """Queue the copies of what the call has written. Called at most once."""
        with self._gpu.current():
            for (address, nbytes), host in self._written.items():
                if nbytes:
                    cuda.copy(self._staging.stream_out, address, host, nbytes)
            self._back = self._gpu.record(self._staging.stream_out)
            ended = self._gpu.record(self._staging.stream_out)
        self._staging.give_back(_Used(self._memory, ended, ()))  # now: this object may live much longer

    def is_completed(self) -> bool:
        """Return whether the results are on the device, after ``copy_back``."""
        return cuda.has_come(self._back)

    def let_streams_wait(self) -> None:
        """Let the current streams of the call's arrays wait for the results, after ``copy_back``."""
        with self._gpu.current():
            for stream in cuda_array.current_streams(self._arrays):
                cuda.let_wait(stream, self._back)
        if any(cuda_array.current_stream(array) is None for array in self._arrays):
            self._wait_for(self._back, "what was queued on its arrays before the call")

    def _wait_for(self, event: Any, what: str) -> None:
        deadline = time.monotonic() + self._seconds
        while not cuda.has_come(event):
            if time.monotonic() > deadline:
                raise DistBackendError(f"GPU {self._gpu.number} has not finished {what}, after {self._seconds:g} s.")
            time.sleep(_PAUSE_SECONDS)

    def __del__(self) -> None:
        if not hasattr(self, "_copied"):
            return
        if self._back is None:  # of a send, and of a call that has failed
            self._staging.give_back(_Used(self._memory, self._copied, self._arrays))
        else:
            self._gpu.give_back(self._copied)
            self._gpu.give_back(self._back)


class _Memory(NamedTuple):
    pages: mmap.mmap
    address: int


class _Used(NamedTuple):
    """What a call has used: it is free when the event has come."""

    memory: _Memory
    ended: Any
    arrays: Sequence[Any]


class _Staging:
    """The streams and the host memory of one device."""

    def __init__(self, device: int) -> None:
        self.gpu = cuda.gpu(device)
        with self.gpu.current():
            self.stream_in = self.gpu.make_stream()
            self.stream_out = self.gpu.make_stream()
        self._lock = threading.RLock()  # the end of a call may come at any place, also in this thread inside of `take`
        self._used: list[_Used] = []
        self._free: dict[int, list[_Memory]] = {}
        self._free_bytes = 0

    def take(self, nbytes: int) -> _Memory:
        """Return at least so many bytes of host memory. The device is the current one."""
        size = 1 << (max(nbytes, _SMALLEST) - 1).bit_length()
        with self._lock:
            self._sweep()
            if free := self._free.get(size):
                self._free_bytes -= size
                return free.pop()
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked child gets a copy
        address = addressof(c_char.from_buffer(pages))
        cuda.register(address, size)
        return _Memory(pages, address)

    def give_back(self, used: _Used) -> None:
        """Take memory back, which may still be in use."""
        with self._lock:
            self._used.append(used)
            if cuda.has_come(used.ended):
                self._sweep()

    def _sweep(self) -> None:
        """Keep what is free now for later calls, up to _MOST_FREE."""
        used, self._used = self._used, []
        for one in used:
            if not cuda.has_come(one.ended):
                self._used.append(one)
                continue
            self.gpu.give_back(one.ended)
            size = len(one.memory.pages)
            if self._free_bytes + size > _MOST_FREE:
                cuda.unregister(one.memory.address)
                continue
            self._free.setdefault(size, []).append(one.memory)
            self._free_bytes += size


@cache
def _staging(device: int) -> _Staging:
    return _Staging(device)
