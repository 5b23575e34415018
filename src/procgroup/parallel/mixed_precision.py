"""Computing in a narrower dtype than the parameters are kept in, as torch's ``_MixedPrecision`` asks for it.

The parameters stay as they are. Each forward computes with narrower copies, made by an operation that autograd knows:
so gradients come back in the parameters' own dtype.
"""

from __future__ import annotations

from typing import Any

from procgroup.parallel.pytorch import torch


class MixedPrecision:
    """What a configuration with ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype`` means for one module."""

    def __init__(self, configuration: Any, module: Any, ignored: frozenset[str]) -> None:
        self._compute = configuration.param_dtype
        self._reduce = configuration.reduce_dtype or configuration.param_dtype
        self._module = module
        self._ignored = ignored
        for name, buffer in module.named_buffers():
            if configuration.buffer_dtype is not None and name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(configuration.buffer_dtype)

    def gradient_dtype(self, parameter: Any) -> Any:
        """Return the dtype in which a parameter's gradient is averaged."""
        return self._reduce if self._reduce is not None and parameter.is_floating_point() else parameter.dtype

    def call(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module in the narrower dtype, on inputs of that dtype."""
        if self._compute is None:
            return self._module(*inputs, **kwargs)
        inputs, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, self._narrow, (inputs, kwargs))
        parameters = {
            name: self._narrow(parameter)
            for name, parameter in self._module.named_parameters()
            if name not in self._ignored
        }
        return torch.func.functional_call(self._module, parameters, inputs, kwargs)

    def _narrow(self, tensor: Any) -> Any:
        return tensor.to(self._compute) if tensor.is_floating_point() else tensor
