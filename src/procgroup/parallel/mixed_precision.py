"""Computing in a narrower dtype than the parameters are kept in, as torch's ``_MixedPrecision`` asks for it.

The parameters stay as they are. Each forward computes with narrower copies, made by an operation that autograd knows:
so gradients come back in the parameters' own dtype. What is checkpointed is computed again inside of the backward: so
the copies are in the parameters' places during that, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from procgroup.parallel.pytorch import torch

Slots: TypeAlias = "list[tuple[dict[str, Any], str]]"


class NarrowCopies:
    """The copies that one forward has computed with, to be put in the parameters' places and taken out again."""

    def __init__(self, slots: Slots, copies: Sequence[Any]) -> None:
        self._slots = slots
        self._copies = copies
        self._before: list[Any] = []

    def put_in(self) -> None:
        """Let the module compute with the copies."""
        self._before = [owner[key] for owner, key in self._slots]
        self._put(self._copies)

    def take_out(self) -> None:
        """Let the module have again what it had before."""
        before, self._before = self._before, []
        if before:
            self._put(before)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the copies in for a while."""
        self.put_in()
        try:
            yield
        finally:
            self.take_out()

    def _put(self, tensors: Sequence[Any]) -> None:
        for (owner, key), tensor in zip(self._slots, tensors, strict=True):
            owner[key] = tensor


class MixedPrecision:
    """What a configuration with ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype`` means for one module."""

    def __init__(self, configuration: Any, module: Any, ignored: frozenset[str]) -> None:
        self._compute = configuration.param_dtype
        self._reduce = configuration.reduce_dtype or configuration.param_dtype
        self._module = module
        self._slots: Slots = [
            (part._parameters, key)
            for name, part in module.named_modules()
            for key, parameter in part._parameters.items()
            if parameter is not None and parameter.is_floating_point() and f"{name}.{key}".lstrip(".") not in ignored
        ]
        for name, buffer in module.named_buffers():
            if configuration.buffer_dtype is not None and name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(configuration.buffer_dtype)

    def gradient_dtype(self, parameter: Any) -> Any:
        """Return the dtype in which a parameter's gradient is averaged."""
        return self._reduce if self._reduce is not None and parameter.is_floating_point() else parameter.dtype

    def call(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, NarrowCopies | None]:
        """Call the module in the narrower dtype, on inputs of that dtype; return its output, and the copies."""
        if self._compute is None:
            return self._module(*inputs, **kwargs), None
        inputs, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, self._narrow, (inputs, kwargs))
        copies = self._copies()
        with copies.in_place():
            return self._module(*inputs, **kwargs), copies

    def _copies(self) -> NarrowCopies:
        parameters = [owner[key] for owner, key in self._slots]
        distinct = {id(parameter): parameter for parameter in parameters}  # one may be in several places
        narrow = {name: self._narrow(parameter) for name, parameter in distinct.items()}
        return NarrowCopies(self._slots, [narrow[id(parameter)] for parameter in parameters])

    def _narrow(self, tensor: Any) -> Any:
        return tensor.to(self._compute) if tensor.is_floating_point() else tensor
