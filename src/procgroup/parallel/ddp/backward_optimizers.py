"""Optimizers that step inside the backward, as soon as the gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from procgroup.parallel.pytorch import torch


class BackwardOptimizers:
    """The optimizers of one wrapped model that step at the end of each backward whose gradients are averaged."""

    def __init__(self) -> None:
        self._optimizers: list[Any] = []
        self._has_taken_over = False

    def add(self, optimizer_class: Callable[..., Any], parameters: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        """Create an optimizer of a class for ``parameters``."""
        self._optimizers.append(optimizer_class(list(parameters), *args, **kwargs))

    def take_over(self, parameters: Iterable[Any]) -> None:
        """Take over, once, the optimizers that torch's ``_apply_optimizer_in_backward`` has set on parameters.

        Torch's own hooks would step before the gradients are averaged.
        """
        if self._has_taken_over:
            return
        self._has_taken_over = True
        chosen = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
        if not chosen:
            return
        handles = torch.distributed.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map
        for parameter in chosen:
            for handle in handles.get(parameter, ()):
                handle.remove()
        self._optimizers.append(_OptimizersOfParameters(chosen))

    def step(self) -> None:
        """Step all optimizers."""
        for optimizer in self._optimizers:
            optimizer.step()


class _OptimizersOfParameters:
    """The optimizers that ``_apply_optimizer_in_backward`` has set on parameters."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = parameters

    def step(self) -> None:
        """Step the optimizers of each parameter that has a gradient, and set the gradient to None, as torch does."""
        for parameter in self._parameters:
            optimizers = getattr(parameter, "_in_backward_optimizers", ())  # a copied parameter has none
            if optimizers and parameter.grad is not None:
                for optimizer in optimizers:
                    optimizer.step()
                parameter.grad = None
