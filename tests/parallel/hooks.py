"""What the tests of communication hooks share: buckets of any numbers, and a small problem to train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from parallel import models
from torch import nn

import procgroup as dist
from procgroup.parallel import DistributedDataParallel, GradBucket
from procgroup.parallel.communication_hooks.interface import GradientLayout
from procgroup.testing import run_ranks

Hook = Callable[[Any, GradBucket], Any]


def bucket_of(*gradients: torch.Tensor, parameters: Sequence[Any] | None = None, is_last: bool = True) -> GradBucket:
    """Return a bucket with these gradients, of new parameters unless some are given."""
    if parameters is None:
        parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    layouts = [GradientLayout(parameter) for parameter in parameters]
    return GradBucket(0, torch.cat([gradient.reshape(-1) for gradient in gradients]), layouts, is_last)


def averaged(hook: Hook, state: Any, *gradients: torch.Tensor, parameters: Sequence[Any] | None = None) -> torch.Tensor:
    """Return what a hook makes of one bucket."""
    bucket = bucket_of(*gradients, parameters=parameters)
    result = hook(state, bucket).wait()
    assert result.dtype == gradients[0].dtype and result.shape == bucket.buffer().shape
    return result.clone()  # type: ignore[no-any-return]


def numbers(rank: int, count: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return a rank's random numbers, whose magnitudes spread over four decades."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    return (scale * normal * 10 ** (4 * torch.rand(count, generator=generator, dtype=torch.float64) - 4)).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def assert_same_bits(results: Sequence[torch.Tensor]) -> None:
    assert all(bits(result) == bits(results[0]) for result in results)


def on_ranks(size: int, play: Callable[[int], Any]) -> list[Any]:
    """Return what ``play(rank)`` returns on each of the ranks, which are threads."""
    return run_ranks(lambda: play(dist.get_rank()), size)


POINTS, FEATURES, CLASSES = 240, 20, 4


def classified() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of four classes, which no straight line divides; one label in five is wrong, so loss remains."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(POINTS, FEATURES, generator=generator)
    first = torch.randn(FEATURES, 16, generator=generator)
    second = torch.randn(16, CLASSES, generator=generator)
    labels = (torch.tanh(inputs @ first) @ second).argmax(1)
    wrong = torch.randint(CLASSES, (POINTS // 5,), generator=generator)
    return inputs, torch.cat([wrong, labels[len(wrong) :]])


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))


Step = Callable[[], Any]


def loss_after(
    steps: int,
    hook: Callable[[], tuple[Any, Hook]] | None = None,
    *,
    size: int = 2,
    averages: Callable[[nn.Module, Any], Step] | None = None,
    wraps: bool = True,
    **options: Any,
) -> float:
    """Return the loss over all ranks' points after so many steps. The ranks must end with the same bits.

    ``averages(model, optimizer)`` returns what takes a step in place of the optimizer.
    """

    def play(rank: int) -> torch.Tensor:
        model = models.make(classifier).float()
        inputs, labels = classified()
        mine = slice(rank, None, size)
        wrapped = DistributedDataParallel(model, **options) if wraps else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        take_step = averages(model, optimizer) if averages else optimizer.step
        if hook is not None:
            wrapped.register_comm_hook(*hook())
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(inputs[mine]), labels[mine]).backward()
            take_step()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(inputs), labels)
        return torch.cat([loss.reshape(1), *(parameter.detach().reshape(-1) for parameter in model.parameters())])

    ends = on_ranks(size, play)
    assert_same_bits(ends)
    return float(ends[0][0])
