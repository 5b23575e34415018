"""The memory layout of a parameter's gradient: its shape and strides, and how it is stored in a flat buffer."""

from __future__ import annotations

import math
from typing import Any

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
        return self.parameter.stride() if self.has_parameter_strides else _contiguous_strides(self.shape)

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


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(length, 1) for length in shape[dimension + 1 :]) for dimension in range(len(shape)))


def _covers_its_memory(tensor: Any) -> bool:
    """Return whether a tensor's elements fill a block of memory without gaps or overlaps."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True
