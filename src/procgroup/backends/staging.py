"""Stage arrays on a CUDA device through host memory, for calls that no backend of the group makes on the device.

::

    caller's stream     kernels (ready)                                    let_streams_wait  kernels
    stream in                      copies what is read (copied)           /
    transport                                           the call         /
    stream out                                                  copies what is written (back)

The ranks match calls by their order: a call keeps its place, and is not begun before its inputs have been copied. A
send waits for the copy before it returns. The host memory is the process's own, which the other ranks of the host can
read, and is registered with the device (pinned), so that copies run beside the program.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from procgroup.arrays import cuda_array
from procgroup.backends import cuda
from procgroup.errors import DistBackendError
from procgroup.groups.backend import Span

_ALIGNMENT = 64
_MIN_BYTES = 1 << 16
_MAX_FREE_BYTES = 1 << 28
"""How many bytes of free host memory of one device are kept for later calls."""
_PAUSE_SECONDS = 0.00005


@cache
def is_available() -> bool:
    """Return whether NVIDIA's cuda-bindings are installed, which staging needs."""
    try:
        return find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False


class StagedCall:
    """The arrays of one call: what it reads is copied to pinned host memory, and what it writes is copied back."""

    def __init__(
        self, device: int, inputs: Sequence[Span], outputs: Sequence[Span], arrays: Sequence[Any], seconds: float
    ) -> None:
        self._staging = _staging(device)
        self._gpu = self._staging.gpu
        self._arrays = arrays
        self._seconds = seconds
        self._back: Any = None
        self._has_given_back = False
        spans = list(dict.fromkeys((*inputs, *outputs)))
        places, total = [], 0
        for _, nbytes in spans:
            places.append(total)
            total += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._gpu.current():
            self._memory = self._staging.take(total)
            hosts = {span: self._memory.address + place for span, place in zip(spans, places, strict=True)}
            try:
                self._copied = self._copy_in({span: hosts[span] for span in inputs})
            except BaseException:  # some copies may have been queued
                self._staging.keep_until_here(self._staging.stream_in, self._memory, arrays)
                raise
        self.inputs: list[int] = [hosts[span] for span in inputs]
        """The address of the host memory of each block that the call reads."""
        self.outputs: list[int] = [hosts[span] for span in outputs]
        """The address of the host memory of each block that the call writes."""
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
        """Wait until it is. Raises DistBackendError after the call's timeout."""
        self._wait_for(self._copied, "the work that was queued before the send")

    def copy_back(self) -> None:
        """Queue the copies of what the call has written. Called at most once."""
        self._has_given_back = True
        with self._gpu.current():
            try:
                for (address, nbytes), host in self._written.items():
                    if nbytes:
                        cuda.copy(self._staging.stream_out, address, host, nbytes)
                self._back = self._gpu.record(self._staging.stream_out)
            finally:  # now: this object may live much longer
                arrays = () if self._back is not None else self._arrays
                self._staging.keep_until_here(self._staging.stream_out, self._memory, arrays)

    def is_completed(self) -> bool:
        """Return whether the results are on the device, after ``copy_back``."""
        return cuda.has_come(self._back)

    def let_streams_wait(self) -> None:
        """Let the current streams of the call's arrays wait for the results, after ``copy_back``."""
        with self._gpu.current():
            for stream in cuda_array.current_streams(self._arrays):
                cuda.let_wait(stream, self._back)
        if any(cuda_array.current_stream(array) is None for array in self._arrays):
            self._wait_for(self._back, "the copies of the call's results")

    def _wait_for(self, event: Any, what: str) -> None:
        deadline = time.monotonic() + self._seconds
        while not cuda.has_come(event):
            if time.monotonic() > deadline:
                raise DistBackendError(f"GPU {self._gpu.number} has not finished {what}, after {self._seconds:g} s.")
            time.sleep(_PAUSE_SECONDS)

    def __del__(self) -> None:
        if not hasattr(self, "_copied") or not self._staging.is_of_this_process():
            return
        if not self._has_given_back:  # of a send, and of a call that has failed
            self._staging.keep(_Used(self._memory, self._copied, self._arrays))
        elif self._back is not None and not cuda.has_come(self._back):  # of a group that has failed
            self._staging.keep(_Used(None, self._back, self._arrays))
        else:
            self._gpu.give_back(self._copied)
            if self._back is not None:
                self._gpu.give_back(self._back)


class _Memory(NamedTuple):
    pages: mmap.mmap
    address: int


@dataclass(eq=False)
class _Used:
    """Host memory, if any, and arrays that are in use until an event has come."""

    memory: _Memory | None
    ended: Any
    """None until it is recorded."""
    arrays: Sequence[Any]


class _Staging:
    """The streams and the host memory of one device."""

    def __init__(self, device: int) -> None:
        self.gpu = cuda.gpu(device)
        with self.gpu.current():
            self.stream_in = self.gpu.make_stream()
            self.stream_out = self.gpu.make_stream()
        # Reentrant: garbage collection may run StagedCall.__del__ inside of `take`.
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._used: list[_Used] = []
        self._free: dict[int, list[_Memory]] = {}
        self._free_bytes = 0

    def is_of_this_process(self) -> bool:
        """Return False in a forked child, where the device cannot be used, and the lock may be held for ever."""
        return os.getpid() == self._process

    def take(self, nbytes: int) -> _Memory:
        """Return at least so many bytes of host memory. The device is the current one."""
        size = 1 << (max(nbytes, _MIN_BYTES) - 1).bit_length()
        with self._lock:
            self._sweep()
            if free := self._free.get(size):
                self._free_bytes -= size
                return free.pop()
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked child gets a copy
        address = addressof(c_char.from_buffer(pages))
        cuda.register(address, size)
        return _Memory(pages, address)

    def keep(self, used: _Used) -> None:
        """Keep what is in use, and free the memory later."""
        with self._lock:
            self._used.append(used)

    def keep_until_here(self, stream: int, memory: _Memory, arrays: Sequence[Any]) -> None:
        """Keep what is used on a stream up to now. The device is the current one."""
        used = _Used(memory, None, arrays)
        self.keep(used)  # for ever, where the device records no event any more
        used.ended = self.gpu.record(stream)

    def _sweep(self) -> None:
        """Free memory whose event has come, and unregister what exceeds _MAX_FREE_BYTES. As `take`."""
        for used in list(self._used):
            if used.ended is None or not cuda.has_come(used.ended):
                continue
            self._used.remove(used)
            self.gpu.give_back(used.ended)
            if used.memory is None:
                continue
            size = len(used.memory.pages)
            if self._free_bytes + size > _MAX_FREE_BYTES:
                cuda.unregister(used.memory.address)
                continue
            self._free.setdefault(size, []).append(used.memory)
            self._free_bytes += size


@cache
def _staging(device: int) -> _Staging:
    return _Staging(device)
