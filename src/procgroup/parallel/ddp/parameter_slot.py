"""One parameter of a wrapped model with the state of its gradient: new or known, expected or arrived."""

from __future__ import annotations

import weakref
from typing import Any

from procgroup.parallel.gradient_layout import GradientLayout

AT_END = -1


class ParameterSlot:
    """One parameter, its gradient's layout and dtype in a bucket, and what has happened to the gradient."""

    __slots__ = (
        "_synchronized",
        "_version",
        "arrivals",
        "awaited",
        "dtype",
        "index",
        "is_sparse",
        "layout",
        "name",
        "parameter",
        "view",
    )

    def __init__(self, index: int, name: str, parameter: Any, dtype: Any, is_sparse: bool) -> None:
        """``dtype`` is that of the average; ``is_sparse`` means gradients of torch's sparse layout."""
        self.index: int = index
        self.name: str = name
        self.parameter: Any = parameter
        self.layout: GradientLayout = GradientLayout(parameter)
        self.dtype: Any = dtype
        self.is_sparse: bool = is_sparse
        # The gradient's memory in its bucket; None for a gradient without a packed bucket.
        self.view: Any = None
        self.arrivals: int = 0
        # How many times autograd adds to the gradient in one backward: 0 for an unused parameter, AT_END when the
        # number is unknown until the backward ends.
        self.awaited: int = 1
        self._synchronized: Any = None
        self._version = 0

    def __str__(self) -> str:
        return f"{self.name} {self.layout.shape}"

    @property
    def device(self) -> Any:
        """The device of the parameter, and of its gradient."""
        return self.parameter.device

    @property
    def nbytes(self) -> int:
        """Size of the gradient in its bucket, in bytes."""
        return int(self.parameter.numel() * self.dtype.itemsize)

    def mark_synchronized(self) -> None:
        """Mark the gradient as synchronized; it stays so until the program changes it."""
        gradient = self.parameter.grad
        self._synchronized = None if gradient is None else weakref.ref(gradient)
        self._version = 0 if gradient is None else gradient._version

    def is_new(self) -> bool:
        """Return whether the gradient exists and has changed since ``mark_synchronized``."""
        gradient = self.parameter.grad
        if gradient is None:
            return False
        return self._synchronized is None or self._synchronized() is not gradient or gradient._version != self._version

    def new_gradient(self) -> Any:
        """Return the gradient if it is new, else None. Raises RuntimeError for a gradient that is part of a graph."""
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
