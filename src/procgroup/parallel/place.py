"""One parameter of a model in training, and its gradient: whether it is new, how it lies in memory, where it goes."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

from procgroup.parallel.pytorch import torch

if TYPE_CHECKING:
    from procgroup.parallel.buckets import Bucket

AT_END = -1


class Place:
    """One parameter, and where its gradient goes."""

    __slots__ = (
        "_left",
        "_version",
        "arrivals",
        "awaited",
        "bucket",
        "dtype",
        "index",
        "is_dense",
        "is_sparse",
        "name",
        "parameter",
        "shape",
        "view",
    )

    def __init__(self, index: int, name: str, parameter: Any, dtype: Any, is_sparse: bool) -> None:
        self.index: int = index
        self.name: str = name
        self.parameter: Any = parameter
        # In which the gradient is averaged.
        self.dtype: Any = dtype
        self.shape: tuple[Any, ...] = tuple(parameter.shape)
        self.is_dense: bool = _fills_its_memory(parameter)
        # Whether its gradients are of torch's sparse layout.
        self.is_sparse: bool = is_sparse
        self.bucket: Bucket | None = None
        self.view: Any = None
        self.arrivals: int = 0
        # How many times autograd adds to the gradient in one backward: 0 when it is not waited for, AT_END when that
        # is not known before the backward is over.
        self.awaited: int = 1
        self._left: Any = None
        self._version = 0

    def __str__(self) -> str:
        return f"{self.name} {self.shape}"

    @property
    def nbytes(self) -> int:
        """How many bytes the gradient has in its bucket."""
        return int(self.parameter.numel() * self.dtype.itemsize)

    def remember(self) -> None:
        """Take the parameter's gradient for one that all ranks know, until somebody changes it."""
        gradient = self.parameter.grad
        self._left = None if gradient is None else weakref.ref(gradient)
        self._version = 0 if gradient is None else gradient._version

    def is_new(self) -> bool:
        """Tell whether the parameter has a gradient that has changed since ``remember``."""
        gradient = self.parameter.grad
        if gradient is None:
            return False
        return self._left is None or self._left() is not gradient or gradient._version != self._version

    def new_gradient(self) -> Any:
        """Return the parameter's gradient if it is new, else None. Raises RuntimeError when it is part of a graph."""
        if not self.is_new():
            return None
        gradient = self.parameter.grad
        if gradient.requires_grad:
            raise RuntimeError(
                f"DistributedDataParallel averages gradients outside of the graph, so a backward with "
                f"create_graph=True cannot be differentiated again ({self}). Use torch.autograd.grad(..., "
                "create_graph=True), and call backward() without it on what you compute from that."
            )
        return gradient

    def flat(self, tensor: Any) -> Any:
        """Return a tensor of the parameter's layout as one dimension, in the order of memory."""
        return tensor.as_strided((tensor.numel(),), (1,)) if self.is_dense else tensor.view(-1)

    def shaped(self, flat: Any) -> Any:
        """Return the memory of a flat tensor in the parameter's shape and layout; not as a view, for autograd."""
        shaped = torch.empty(0, dtype=flat.dtype)
        return shaped.set_(flat.untyped_storage(), flat.storage_offset(), self.shape, self._strides())

    def has_layout(self, tensor: Any) -> bool:
        """Tell whether a tensor lies in memory as ``flat`` takes it."""
        return bool(tensor.layout is torch.strided and tensor.stride() == self._strides())

    def copy_of(self, gradient: Any) -> Any:
        """Return a new tensor of the parameter's layout: a gradient, or zeros for None."""
        made = torch.empty_strided(self.shape, self._strides(), dtype=self.parameter.dtype)
        return made.zero_() if gradient is None else made.copy_(dense(gradient))

    def _strides(self) -> tuple[int, ...]:
        # A parameter that has gaps in memory, or elements that share it, has a contiguous gradient.
        return self.parameter.stride() if self.is_dense else _contiguous_strides(self.shape)


def dense(gradient: Any) -> Any:
    """Return a gradient as a tensor that is not sparse."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(length, 1) for length in shape[dimension + 1 :]) for dimension in range(len(shape)))


def _fills_its_memory(tensor: Any) -> bool:
    """Tell whether a tensor's elements lie side by side in memory, in any order of its dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True
