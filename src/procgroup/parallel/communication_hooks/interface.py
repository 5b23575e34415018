"""The interface between DistributedDataParallel and a communication hook.

DistributedDataParallel calls a ``Hook`` with a ``GradBucket`` as soon as the bucket is complete. The hook returns a
``Waitable``, and DistributedDataParallel waits for it at the end of the backward: bucket by bucket, so that collectives
in ``wait()`` have the same order on all ranks. The names are those of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from procgroup.parallel.pytorch import torch


class GradientLayout:
    """Shape and strides of the gradient of one parameter.

    A gradient has its parameter's strides when these cover a block of memory without gaps or overlaps, in any order of
    the dimensions. Otherwise the gradient is contiguous.
    """

    __slots__ = ("has_parameter_strides", "parameter", "shape")

    def __init__(self, parameter: Any) -> None:
        self.parameter: Any = parameter
        self.shape: tuple[int, ...] = tuple(parameter.shape)
        self.has_parameter_strides: bool = _covers_its_memory(parameter)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the gradient, in elements."""
        if not self.has_parameter_strides:
            return tuple(
                math.prod(max(each, 1) for each in self.shape[after:]) for after in range(1, len(self.shape) + 1)
            )
        strides: tuple[int, ...] = self.parameter.stride()
        return strides

    def flatten(self, tensor: Any) -> Any:
        """Return a one-dimensional view of a tensor of this layout, in the order of memory."""
        return tensor.as_strided((tensor.numel(),), (1,)) if self.has_parameter_strides else tensor.view(-1)

    def unflatten(self, flat: Any) -> Any:
        """Return a tensor of this layout over the memory of ``flat``.

        The result is not a view for autograd: a program that saves one gradient does not save the whole buffer.
        """
        tensor = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return tensor.set_(flat.untyped_storage(), flat.storage_offset(), self.shape, self.strides)

    def matches(self, tensor: Any) -> bool:
        """Return whether a tensor is dense and has these strides."""
        return bool(tensor.layout is torch.strided and tensor.stride() == self.strides)

    def copy(self, gradient: Any) -> Any:
        """Return a new tensor of this layout, on the parameter's device and of its dtype.

        It is a copy of a gradient, or zeros for None.
        """
        like = self.parameter
        tensor = torch.empty_strided(self.shape, self.strides, dtype=like.dtype, device=like.device)
        return tensor.zero_() if gradient is None else tensor.copy_(to_dense(gradient))


def to_dense(gradient: Any) -> Any:
    """Return a gradient as a dense tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _covers_its_memory(tensor: Any) -> bool:
    """Return whether a tensor's elements fill a block of memory without gaps or overlaps."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


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
