"""What the tests of DistributedDataParallel on stand-in GPUs share: the oracle on the CPU.

Import it where torch has the stand-in GPUs already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from parallel import models

from procgroup.parallel import DistributedDataParallel


def wrap(build: Callable[[], Any], **options: Any) -> tuple[DistributedDataParallel, Any]:
    """Return a wrapped model on this rank's GPU and a copy on the CPU, which is not wrapped."""
    model = models.make(build)
    alone = copy.deepcopy(model)
    return DistributedDataParallel(model.cuda(), **options), alone


def to_cpu(model: Any) -> Any:
    """Give a module's parameters gradients on the CPU, in a copy, to compare them."""
    gradients = [None if each.grad is None else each.grad.cpu() for each in model.module.parameters()]  # without delay
    copied = copy.deepcopy(model.module).cpu()
    for mine, gradient in zip(copied.parameters(), gradients, strict=True):
        mine.grad = gradient
    return copied


def assert_same_gradients(ours: DistributedDataParallel, alone: Any, where: object = "") -> None:
    """Compare gradients on a GPU with those of a module on the CPU."""
    models.assert_same_gradients(to_cpu(ours), alone, where)


def train(ours: DistributedDataParallel, alone: Any, steps: int = 4) -> None:
    """Train both and compare the gradients of every step, and the parameters at the end."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, alone)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole = models.batch(step)
        models.loss_of(ours(models.part(whole).cuda())).backward()
        models.loss_of(alone(whole)).backward()
        assert_same_gradients(ours, alone, step)
        for optimizer in optimizers:
            optimizer.step()
    for mine, expected in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), expected)
