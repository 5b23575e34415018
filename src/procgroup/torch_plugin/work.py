"""One issued call, as torch.distributed sees it.

torch's C++ code, such as stock DDP, never waits for a call itself but for its future. An exception that is set on a
torch future directly ends torch 2.13's process, so a failure enters by way of ``then``: what the callback raises is
what the future raises. torch makes a RuntimeError of it, whose text ends with a line for each Python frame that it came
through: so it is raised in C++, through none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as distributed

from procgroup.arrays.untraced import untraced
from procgroup.groups.future import Future
from procgroup.process.exit_reason import note_translated
from procgroup.torch_plugin import callbacks

if TYPE_CHECKING:
    from procgroup._native import Work

_UNLIMITED = timedelta(0)


@untraced
class TorchWork(distributed.Work):  # type: ignore[misc]
    """A call of the plug-in.

    ``outputs`` is what ``result()`` and the future give; ``group_rank`` turns a global rank into that of the group.
    """

    __slots__ = ("_call", "_future", "_group_rank", "_outputs")

    def __init__(
        self, call: Work | _CompletedCall, outputs: Any, group_rank: Callable[[int], int] | None = None
    ) -> None:
        super().__init__()
        self._call = call
        self._outputs = outputs
        self._group_rank = group_rank

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        """Wait for the call and return True; raise the error of a failed call. Zero means its own deadline."""
        return self._call.wait(None if timeout is _UNLIMITED else timeout)

    def is_completed(self) -> bool:
        """Return whether the call has completed, with or without an error. Does not wait."""
        return self._call.is_completed()

    def is_success(self) -> bool:
        """Return whether the call has completed without an error."""
        return self._call.is_success()

    def exception(self) -> BaseException | None:
        """Return the error of a failed call; None while it runs and when it succeeded."""
        return self._call.exception()

    def result(self) -> Any:
        """Return the call's tensors. Raises RuntimeError while it runs, and its error if it failed."""
        self._call.result()
        return self._outputs

    def synchronize(self) -> None:
        """Wait until the call has completed."""
        self._call.wait()

    def block_current_stream(self) -> None:
        """Let the current streams of the tensors' GPUs wait for the call; on CPUs the calling thread is the stream."""
        self._call.block_current_stream()

    def source_rank(self) -> int:
        """Return the group rank of a completed receive's sender. RuntimeError for other calls."""
        rank = self._call.source_rank()
        return rank if self._group_rank is None else self._group_rank(rank)

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """Return a torch future of ``result()``. Its callbacks run on a thread of their own; a failure raises there."""
        future = getattr(self, "_future", None)
        if future is None:
            future = self._future = self._make_future()
        return future

    def on_completion(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the call completes: on the thread that completes calls, or here if it has."""
        self._call.get_future().add_done_callback(lambda _: callback())

    def _make_future(self) -> Any:
        from procgroup._native import Outcome  # loaded with the group, and not with this package

        device = _gpu_of(self._outputs)
        end = torch.futures.Future(devices=None if device is None else [device])
        stream = None if device is None else self._call.stream
        if stream is not None:  # it is queued: what uses the tensors on a stream comes after that one's work
            with torch.cuda.stream(_stream(stream, device)):
                end.set_result(self._outputs)
            return end

        def outcome() -> Any:
            error = self._call.exception()
            if error is None:
                return self._outputs
            note_translated(error)
            return error

        future = end.then(Outcome(outcome))
        if self._call.is_completed():
            end.set_result(None)
        else:
            self._call.get_future().add_done_callback(lambda _: callbacks.run(lambda: end.set_result(None)))
        return future


def _gpu_of(outputs: Any) -> Any | None:
    """Return the device of the first tensor, where that is a GPU."""
    while isinstance(outputs, (list, tuple)):
        if not outputs:
            return None
        outputs = outputs[0]
    return outputs.device if outputs.is_cuda else None


@functools.lru_cache(1024)
def _stream(handle: int, device: Any) -> Any:
    return torch.cuda.ExternalStream(handle, device)


class _CompletedCall:
    """A call that has completed without an error."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Any]:
        return []

    def block_current_stream(self) -> None:
        """Do nothing."""

    @property
    def stream(self) -> None:
        """None: it is queued on no stream."""

    def source_rank(self) -> int:
        raise RuntimeError("sourceRank() is for receives; this call was a blocking collective, which has completed.")

    def get_future(self) -> Future:
        future = Future()
        future.set_result([])
        return future


def completed_work(outputs: Any) -> TorchWork:
    """Return the work of a call that has completed before it returned."""
    return TorchWork(_CompletedCall(), outputs)


COMPLETED = completed_work([])
"""The work of every blocking call: completed, and without its tensors, which the caller has."""
