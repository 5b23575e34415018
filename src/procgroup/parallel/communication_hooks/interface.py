"""The interface between DistributedDataParallel and a communication hook.

DistributedDataParallel calls a ``Hook`` with a ``GradBucket`` as soon as the bucket is complete. The hook returns a
``Waitable``, and DistributedDataParallel waits for it at the end of the backward: bucket by bucket, so that collectives
in ``wait()`` have the same order on all ranks. The names are those of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from procgroup.parallel.gradient_layout import GradientLayout
from procgroup.parallel.pytorch import torch


class GradBucket:
    """The gradients of several parameters, one after the other in one flat tensor."""

    def __init__(self, index: int, buffer: Any, layouts: Sequence[GradientLayout], is_last: bool) -> None:
        self._index = index
        self._buffer = buffer
        self._layouts = layouts
        self._is_last = is_last

    def index(self) -> int:
        """Return the bucket's number. Buckets are numbered anew once, after the first step."""
        return self._index

    def buffer(self) -> Any:
        """Return the flat tensor of one dimension, on the parameters' device.

        In host memory all ranks of the host can read it.
        """
        return self._buffer

    def gradients(self) -> list[Any]:
        """Return the gradient of each parameter: tensors over the buffer's memory, in the parameters' shapes."""
        counts = [layout.parameter.numel() for layout in self._layouts]
        return [layout.unflatten(flat) for layout, flat in zip(self._layouts, self._buffer.split(counts), strict=True)]

    def parameters(self) -> list[Any]:
        """Return the parameters of the gradients, in the same order."""
        return [layout.parameter for layout in self._layouts]

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._is_last

    def set_buffer(self, buffer: Any) -> None:
        """Replace the flat tensor, for instance by one of another dtype."""
        self._buffer = buffer


class Waitable(Protocol):
    """The result of a communication hook: a Future of procgroup or of PyTorch, or any object with ``wait()``."""

    def wait(self) -> Any:
        """Wait for the average; return a tensor with the bucket's number of elements, or a list that begins with it."""


Hook = Callable[[Any, GradBucket], Waitable]
"""A communication hook: a function of a state and a bucket that averages the bucket."""


class Pending:
    """A ``Waitable`` that post-processes the result of another one.

    ``finish`` may call collectives, because DistributedDataParallel waits in the same order on every rank.
    """

    def __init__(self, waitable: Waitable, finish: Callable[[Any], Any]) -> None:
        self._waitable = waitable
        self._finish = finish

    def wait(self) -> Any:
        """Wait, and return the result of ``finish``."""
        return self._finish(self._waitable.wait())


class HookCall:
    """A registered hook with its state. Checks what the hook and its ``wait()`` return."""

    def __init__(self, state: Any, hook: Hook) -> None:
        self._state = state
        self._hook = hook

    def begin(self, bucket: GradBucket) -> Waitable:
        """Call the hook. Raises TypeError when its result has no ``wait()``."""
        pending = self._hook(self._state, bucket)
        if not callable(getattr(pending, "wait", None)):
            raise TypeError(
                f"{self} returned {_describe(pending)}; expected something with wait() that gives the averaged bucket, "
                "such as a Future of procgroup or of torch."
            )
        return pending

    def finish(self, pending: Waitable, count: int, bucket: object) -> Any:
        """Wait for a bucket's average and return it. Raises TypeError unless it is a tensor of ``count`` elements."""
        result = pending.wait()
        if isinstance(result, (list, tuple)) and result:
            result = result[0]
        if not isinstance(result, torch.Tensor) or result.numel() != count:
            raise TypeError(
                f"{self} gave {_describe(result)} for {bucket}; expected a tensor of {count} elements. "
                "Of a Work return get_future(), which gives the tensors of the call."
            )
        return result

    def __str__(self) -> str:
        return f"Communication hook {getattr(self._hook, '__name__', repr(self._hook))}"


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
