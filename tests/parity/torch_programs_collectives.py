"""Programs of functional collectives: plain, differentiable and compiled.

Plain calls are in parity/test_parity.py, and in the table of torch_plugin/test_calls.py and torch_gpus/test_calls.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable


def numbers(rank: int, count: int = 6) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact."""
    return ((torch.arange(count) * (rank + 1) + rank) % 4 + 1).float()


def average(rank: int, size: int, folder: Path) -> Any:
    """Gloo has no AVG of its own; what torch builds for the functional ones is compared."""
    return functional.all_reduce(numbers(rank), "avg", dist.group.WORLD) * 1


def functional_collectives(rank: int, size: int, folder: Path) -> Any:
    group = dist.group.WORLD
    assert group is not None
    results = {
        "all_reduce": functional.all_reduce(numbers(rank), "sum", group),
        "all_reduce max": functional.all_reduce(numbers(rank), "max", group),
        "broadcast": functional.broadcast(numbers(rank), 1, group),
        "all_gather_tensor": functional.all_gather_tensor(numbers(rank), 0, group),
        "all_gather_tensor 1": functional.all_gather_tensor(numbers(rank).reshape(2, 3), 1, group),
        "reduce_scatter_tensor": functional.reduce_scatter_tensor(numbers(rank, 4 * size), "sum", 0, group),
        "reduce_scatter_tensor 1": functional.reduce_scatter_tensor(
            numbers(rank, 4 * size).reshape(2, 2 * size), "sum", 1, group
        ),
        "all_to_all_single": functional.all_to_all_single(numbers(rank, 2 * size), None, None, group),
        "all_to_all_single uneven": functional.all_to_all_single(
            numbers(rank, 3 * size), [3] * size, [3] * size, group
        ),
        "permute_tensor": functional.permute_tensor(numbers(rank), [(r + 1) % size for r in range(size)], group),
        "all_reduce_coalesced": functional.all_reduce_coalesced([numbers(rank), numbers(rank, 3)], "sum", group),
        "all_gather_coalesced": functional.all_gather_into_tensor_coalesced([numbers(rank), numbers(rank, 3)], group),
        "reduce_scatter_coalesced": functional.reduce_scatter_tensor_coalesced(
            [numbers(rank, 2 * size), numbers(rank, size)], "sum", [0, 0], group
        ),
    }
    return {name: _waited(value) for name, value in results.items()}


def _waited(value: Any) -> Any:
    if isinstance(value, list):
        return [_waited(item) for item in value]
    return value.wait() if isinstance(value, functional.AsyncCollectiveTensor) else value


def functional_with_autograd(rank: int, size: int, folder: Path) -> Any:
    group = dist.group.WORLD
    assert group is not None
    x = numbers(rank, 2 * size).requires_grad_()
    calls = [
        lambda: functional.all_gather_tensor_autograd(x, 0, group),
        lambda: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
        lambda: functional.all_to_all_single_autograd(x, [2] * size, [2] * size, group),
        lambda: functional.all_reduce(x, "sum", group),
        lambda: differentiable.all_reduce(x * 1),
        lambda: torch.stack(differentiable.all_gather(x)),
        lambda: differentiable.broadcast(x * 1, 0),
        lambda: torch.cat(differentiable.all_to_all([torch.zeros(2) for _ in range(size)], list(x.chunk(size)))),
        lambda: differentiable.reduce_scatter(torch.zeros(2), list(x.chunk(size))),
    ]
    results = []
    for call in calls:
        x.grad = None
        out = call()
        (out * (rank + 1)).sum().backward()
        results.append((out.detach() * 1, x.grad))
    return results


def compiled(rank: int, size: int, folder: Path) -> Any:
    """What torch.compile traces collectives to, run without its code generator."""
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        summed = functional.all_reduce(x * 2, "sum", group)
        return functional.all_gather_tensor(summed + 1, 0, group) * 3

    x = numbers(rank).requires_grad_(False)
    plain = torch.compile(_in_place, backend="eager", fullgraph=True)(numbers(rank))
    return step(x), plain


def _in_place(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x + 1


PROGRAMS: dict[str, Any] = {
    "functional average": (2, average),
    "functional collectives": (3, functional_collectives),
    "functional collectives with autograd": (2, functional_with_autograd),
    "functional collectives compiled": (2, compiled),
}
