"""What staging needs of a device: two streams beside the program's, events, and memory of the host to copy to.

torch has one interface for it, ``torch.get_device_module``: that of CUDA, and of other devices that have streams.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from procgroup.errors import DistBackendError

_LONGEST_PAUSE = 2e-4

Pairs = list[tuple[Any, Any]]
"""Tensors, each with the one that is copied into it."""


def can_stage(device: Any) -> bool:
    """Tell whether torch knows streams and events of such a device."""
    module = getattr(torch, device.type, None)
    return all(hasattr(module, name) for name in ("Stream", "Event", "current_stream", "stream", "device"))


def host_like(tensor: Any) -> Any:
    """Return memory of the host for a tensor's elements; pinned, so that a device copies beside all else."""
    pin_memory = torch.accelerator.is_available()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin_memory)


class SideStreams:
    """The streams by which one group copies ``into`` the host's memory and ``out`` to one device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self.into: Any = self._module.Stream(device)
        self.out: Any = self._module.Stream(device)

    def event(self, stream: Any | None = None) -> Any:
        """Record an event on a stream (default: the current stream)."""
        event = self._module.Event()
        event.record(stream or self._module.current_stream(self.device))
        return event

    def let_current_wait(self, event: Any) -> None:
        """Make the current stream wait for an event; the calling thread does not wait."""
        self._module.current_stream(self.device).wait_event(event)

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Make a stream the current one, and its device."""
        # Without the device a thread of ours would go back to device 0, where CUDA then takes memory for this process.
        with self._module.device(self.device), self._module.stream(stream):
            yield

    def copy(self, pairs: Pairs, stream: Any) -> None:
        """Copy the second of each pair to the first on a stream, which keeps their memory until then."""
        with torch.inference_mode(), self.using(stream):  # autograd's rules for writing in place are not for this
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                for tensor in (target, source):
                    if not tensor.is_cpu:
                        tensor.record_stream(stream)


def wait_on_host(event: Any, deadline: float, what: str, is_aborted: Callable[[], bool]) -> bool:
    """Wait until an event has completed; False where the group was aborted. Raises DistBackendError at the deadline.

    It asks again and again, since torch's own waiting has no end where the device hangs.
    """
    pause = 0.0
    while not event.query():
        if is_aborted():
            return False
        if time.monotonic() > deadline:
            raise DistBackendError(
                f"{what}: the device did not copy its tensors by the call's deadline. "
                "See what the device is doing, or pass a longer timeout than that."
            )
        time.sleep(pause)
        pause = min(pause + _LONGEST_PAUSE / 10, _LONGEST_PAUSE)
    return True
