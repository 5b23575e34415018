"""The GPUs of this process: streams, and events to order them, through NVIDIA's cuda.bindings.

A stream runs what is queued on it in order. An *event* is recorded on one stream; another stream that waits for it runs
nothing before the first has come to the event::

    caller's stream   .. kernels .. (event) ..............................  kernels ..
                                       \\                                 /  waits for the event
    stream of NCCL                       waits .. NCCL's kernel .. (event)

CUDA has a *current* GPU for each thread, on which events and streams are made. Threads of the program have a choice of
their own, so it is put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from procgroup.errors import DistBackendError

_NOT_READY = 600
_NO_TIMING, _NON_BLOCKING = 2, 1
"""Flags of an event, which measures no time, and of a stream, which does not wait for the legacy default stream."""
_PORTABLE = 1
"""The flag of registered memory that is for all GPUs."""


class Gpu:
    """One GPU of this process. ``gpu`` returns the object of a number."""

    def __init__(self, number: int) -> None:
        self.number: int = number
        self._events: list[Any] = []
        driver = _driver()
        if number >= (present := count()):
            raise DistBackendError(f"there is no GPU {number}: this process has {present}, which are numbered from 0")
        self._device = check(driver.cuDeviceGet(number))
        self._context = check(driver.cuDevicePrimaryCtxRetain(self._device))

    def uuid(self) -> str:
        """Return the number by which NVIDIA tells this GPU apart from all others."""
        return bytes(check(_driver().cuDeviceGetUuid(self._device)).bytes).hex()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU the current one of this thread, inside."""
        driver = _driver()
        before = check(driver.cuCtxGetCurrent())
        check(driver.cuCtxSetCurrent(self._context))
        try:
            yield
        finally:
            check(driver.cuCtxSetCurrent(before))

    def make_stream(self) -> int:
        """Return a new stream of the highest priority. This GPU is the current one."""
        driver = _driver()
        _, highest = check(driver.cuCtxGetStreamPriorityRange())
        return int(check(driver.cuStreamCreateWithPriority(_NON_BLOCKING, highest)))

    def allocate(self, stream: int, nbytes: int) -> int:
        """Return the address of memory for what is queued on a stream from now on, until ``free``."""
        driver = _driver()
        pool = check(driver.cuDeviceGetMemPool(self._device))
        return int(check(driver.cuMemAllocFromPoolAsync(nbytes, pool, stream)))

    def record(self, stream: int) -> Any:
        """Return an event that is recorded on a stream of this GPU. Give it back when nothing waits for it any more."""
        driver = _driver()
        event = self._events.pop() if self._events else check(driver.cuEventCreate(_NO_TIMING))
        check(driver.cuEventRecord(event, stream))
        return event

    def give_back(self, event: Any) -> None:
        """Use an event again for what is recorded later: what waits for it already is not changed by that."""
        self._events.append(event)


@cache
def gpu(number: int) -> Gpu:
    """Return the GPU of this number. Raises DistBackendError where there is none."""
    return Gpu(number)


def let_wait(stream: int, event: Any) -> None:
    """Let a stream wait for an event."""
    check(_driver().cuStreamWaitEvent(stream, event, 0))


def has_come(event: Any) -> bool:
    """Return whether the stream of an event has come to it."""
    (error,) = _driver().cuEventQuery(event)
    if int(error) == _NOT_READY:
        return False
    check((error,))
    return True


def register(address: int, nbytes: int) -> None:
    """Let GPUs copy from and to this memory of the host asynchronously. A GPU is the current one."""
    check(_driver().cuMemHostRegister(address, nbytes, _PORTABLE))


def unregister(address: int) -> None:
    """Unregister memory of the host, before it is freed. A GPU is the current one."""
    check(_driver().cuMemHostUnregister(address))


def copy(stream: int, to: int, source: int, nbytes: int) -> None:
    """Queue a copy between places in the memory of a GPU, or in registered memory of the host."""
    check(_driver().cuMemcpyAsync(to, source, nbytes, stream))


def free(stream: int, address: int) -> None:
    """Free memory when the stream has come here."""
    check(_driver().cuMemFreeAsync(address, stream))


def destroy_stream(stream: int) -> None:
    """Free a stream, when what is queued on it has ended."""
    check(_driver().cuStreamDestroy(stream))


def count() -> int:
    """Return how many GPUs this process has. Raises DistBackendError where the driver is missing or finds none."""
    driver = _driver()
    try:
        check(driver.cuInit(0))
        return int(check(driver.cuDeviceGetCount()))
    except RuntimeError as error:  # cuda.bindings finds no libcuda.so.1
        raise DistBackendError(f"this host has no CUDA driver: {error}") from error


def check(result: Any) -> Any:
    """Return what a function of the driver has returned beside its status. Raises DistBackendError for an error."""
    status, *values = result
    if int(status) != 0:
        error, text = _driver().cuGetErrorString(status)
        described = text.decode() if int(error) == 0 and text else ""
        raise DistBackendError(f"CUDA: {getattr(status, 'name', status)}, {described}")
    return values[0] if len(values) == 1 else values


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver
