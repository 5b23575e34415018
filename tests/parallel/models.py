"""Models for the tests of DistributedDataParallel, and the oracle: one process that sees the whole batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import procgroup as dist
from procgroup.parallel import DistributedDataParallel

PER_RANK = 3
WIDTH = 6

sizes_of_single_gradients = pytest.mark.parametrize("single", [1, 1 << 20], ids=["large", "small"])

_seeding = threading.Lock()


def make(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model in float64 with the same values on every rank; torch's generator is one for all threads."""
    with _seeding:
        torch.manual_seed(seed)
        return build().double()


def batch(step: int, size: int | None = None) -> torch.Tensor:
    """Return the whole batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = PER_RANK * (dist.get_world_size() if size is None else size)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def part(whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    """Return this rank's part of a batch."""
    first = PER_RANK * (dist.get_rank() if rank is None else rank)
    return whole[first : first + PER_RANK]


def loss_of(output: Any) -> torch.Tensor:
    return (output**2).mean()


def wrap(build: Callable[[], nn.Module], **options: Any) -> tuple[DistributedDataParallel, nn.Module]:
    """Return a wrapped model and a copy that is not wrapped."""
    model = make(build)
    alone = copy.deepcopy(model)
    return DistributedDataParallel(model, **options), alone


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name.removeprefix("module."): None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def assert_same_gradients(ours: nn.Module, alone: nn.Module, where: object = "") -> None:
    expected = gradients(alone)
    for name, gradient in gradients(ours).items():
        other = expected[name]
        assert (gradient is None) == (other is None), f"{name} {where}: {gradient} against {other}"
        if gradient is not None and other is not None:
            pair = gradient.to_dense(), other.to_dense()
            torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-13, msg=f"{name} {where}: {pair}")


def mean_of_ranks(alone: nn.Module, losses: Sequence[torch.Tensor]) -> None:
    """Leave in ``alone`` the average of the gradients of all ranks' losses."""
    alone.zero_grad()
    for loss in losses:
        (loss / len(losses)).backward()


def train(ours: nn.Module, alone: nn.Module, steps: int = 4) -> None:
    """Train both and compare the gradients of every step."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, alone)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole = batch(step)
        loss_of(ours(part(whole))).backward()
        loss_of(alone(whole)).backward()
        assert_same_gradients(ours, alone, step)
        for optimizer in optimizers:
            optimizer.step()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 2))


class Branches(nn.Module):
    """One of its branches is used in each call; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 2) for _ in range(3))
        self.never = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]


class Shared(nn.Module):
    """A layer that is used three times, checkpointed or not, and weights that two layers share."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.layer.weight
        self.other = nn.Linear(WIDTH, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # Reentrant checkpoints need an input that requires a gradient.
        hidden = inputs.clone().requires_grad_()
        for _ in range(3):
            if self.use_reentrant is None:
                hidden = torch.tanh(self.layer(hidden))
            else:
                hidden = torch.tanh(checkpoint(self.layer, hidden, use_reentrant=self.use_reentrant))
        return self.other(self.last(hidden))  # type: ignore[no-any-return]


class Normed(nn.Module):
    """With running statistics, and a buffer of its own that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.norm(self.first(inputs))  # type: ignore[no-any-return]


class Failing(torch.autograd.Function):  # type: ignore[misc]
    """Its backward fails on request."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, fails: bool) -> Any:
        ctx.fails = fails
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if ctx.fails:
            raise KeyError("a mistake in backward")
        return gradient, None


class Fragile(nn.Module):
    """A mistake can be in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 4), nn.Linear(4, 2)

    def forward(self, inputs: Any, fails: bool = False) -> Any:
        return self.last(Failing.apply(self.first(inputs), fails))
