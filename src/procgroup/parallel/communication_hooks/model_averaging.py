"""Periodic model averaging: average parameters every few steps, between which the ranks train alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from procgroup.groups.group import ProcessGroup
from procgroup.parallel.group_choice import group_of
from procgroup.parallel.pytorch import torch
from procgroup.types import ReduceOp


class PeriodicModelAverager:
    """Averages parameters over the ranks of a group after every ``period`` steps, from step ``warmup_steps`` on.

    Bytes sent: those of the parameters, once per period. Error: that of ``all_reduce`` with AVG; afterwards all ranks
    have the same bits. ``period`` and ``warmup_steps`` must be the same on all ranks. Raises ValueError for a period
    below 1 and a negative warm-up.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: ProcessGroup | None = None) -> None:
        if warmup_steps < 0:
            raise ValueError(f"Expected parameter `warmup_steps` to be at least 0, got {warmup_steps}.")
        if period < 1:
            raise ValueError(f"Expected parameter `period` to be at least 1, got {period}.")
        if period == 1:
            warnings.warn(
                "With period=1 parameters are averaged after every step, which sends no less than averaging gradients "
                "does. Use DistributedDataParallel alone.",
                stacklevel=2,
            )
        self.process_group = process_group
        self.period = period
        self.warmup_steps = warmup_steps
        self.step: int = 0

    def average_parameters(self, params: Iterable[Any]) -> None:
        """Count a step, and average the parameters or parameter groups if the period has ended.

        Unlike in torch, parameters without a gradient are averaged too: all ranks must average the same parameters,
        and ranks may use different ones.
        """
        past = self.step - self.warmup_steps
        self.step += 1
        if past >= 0 and past % self.period == 0:
            average_tensors(self.process_group, [parameter for entry in params for parameter in _parameters(entry)])


class PostLocalSGDOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer that averages the parameters over the ranks after its steps, with the period of its averager."""

    def __init__(self, optim: Any, averager: PeriodicModelAverager) -> None:
        # torch's constructor is not called: its state is that of the wrapped optimizer.
        self.optim = optim
        self.averager = averager
        self.param_groups: Any = optim.param_groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer, then average parameters if due. Returns the result of the wrapped optimizer."""
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Call it on all ranks, because these parameters are averaged too."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, and the averager's number of steps as ``step``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict``. Without ``step`` the averager counts from 0, with a warning as in torch."""
        self.optim.load_state_dict(state_dict)
        self.param_groups = self.optim.param_groups
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)


def average_tensors(process_group: ProcessGroup | None, tensors: Sequence[Any]) -> None:
    """Average tensors in place over the ranks, with one all_reduce per dtype and device."""
    group = group_of(process_group)
    with torch.no_grad():
        for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
            chosen = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind]
            flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
            group.all_reduce(flat, ReduceOp.AVG)
            for tensor, part in zip(chosen, flat.split([tensor.numel() for tensor in chosen]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _parameters(entry: Any) -> Iterable[Any]:
    if isinstance(entry, dict):
        yield from entry["params"]
    else:
        yield entry
