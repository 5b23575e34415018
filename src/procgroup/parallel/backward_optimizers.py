"""Optimizers that take their steps inside of the backward, as soon as the gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from procgroup.parallel.pytorch import torch


class Steps(Protocol):
    """What takes a step, such as an optimizer."""

    def step(self) -> Any: ...


class OptimizersOfParameters:
    """Those that torch's ``_apply_optimizer_in_backward`` has given to parameters; it takes their gradients too."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters

    def step(self) -> None:
        """Let each parameter that has a gradient take its step, and forget the gradient."""
        for parameter in self._parameters:
            optimizers = getattr(parameter, "_in_backward_optimizers", ())  # a copied parameter has none
            if optimizers and parameter.grad is not None:
                for optimizer in optimizers:
                    optimizer.step()
                parameter.grad = None


def take_over(parameters: Iterable[Any]) -> list[Steps]:
    """Return what steps for parameters that step by themselves: they would do so before the average is there."""
    chosen = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    if not chosen:
        return []
    handles = torch.distributed.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map
    for parameter in chosen:
        for handle in handles.get(parameter, ()):
            handle.remove()
    return [OptimizersOfParameters(chosen)]
