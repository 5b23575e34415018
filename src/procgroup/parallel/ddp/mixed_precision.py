"""Mixed precision: compute in a narrower dtype than that of the parameters, as torch's ``_MixedPrecision`` specifies.

The parameters keep their dtype. Each forward computes with narrower copies made by a differentiable operation, so
gradients have the parameters' dtype. A checkpointed module computes its forward again inside the backward, so the
copies replace the parameters during the backward too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from procgroup.parallel.pytorch import torch

Locations: TypeAlias = "list[tuple[dict[str, Any], str]]"
"""Where a module stores its parameters: dictionaries and keys."""


class NarrowCopies:
    """The narrow copies that one forward computes with. They replace the module's parameters for a while."""

    def __init__(self, locations: Locations, copies: Sequence[Any]) -> None:
        self._locations = locations
        self._copies = copies
        self._replaced: list[Any] = []

    def install(self) -> None:
        """Replace the module's parameters by the copies."""
        self._replaced = [owner[key] for owner, key in self._locations]
        self._store(self._copies)

    def remove(self) -> None:
        """Restore the module's parameters."""
        replaced, self._replaced = self._replaced, []
        if replaced:
            self._store(replaced)

    def _store(self, tensors: Sequence[Any]) -> None:
        for (owner, key), tensor in zip(self._locations, tensors, strict=True):
            owner[key] = tensor


class MixedPrecision:
    """Applies a configuration with ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype`` to one module."""

    def __init__(self, configuration: Any, module: Any, ignored: frozenset[str]) -> None:
        self._compute = configuration.param_dtype
        self._reduce = configuration.reduce_dtype or configuration.param_dtype
        self._module = module
        self._locations: Locations = [
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
        """Call the module with narrow inputs and parameters; return its output and the narrow parameters."""
        if self._compute is None:
            return self._module(*inputs, **kwargs), None
        inputs, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, self._narrow, (inputs, kwargs))
        copies = self._copies()
        copies.install()
        try:
            return self._module(*inputs, **kwargs), copies
        finally:
            copies.remove()

    def _copies(self) -> NarrowCopies:
        parameters = [owner[key] for owner, key in self._locations]
        distinct = {id(parameter): parameter for parameter in parameters}  # modules may share a parameter
        narrow = {name: self._narrow(parameter) for name, parameter in distinct.items()}
        return NarrowCopies(self._locations, [narrow[id(parameter)] for parameter in parameters])

    def _narrow(self, tensor: Any) -> Any:
        return tensor.to(self._compute) if tensor.is_floating_point() else tensor
