"""Programs of collectives of all kinds: plain, asynchronous, coalesced, functional, differentiable, compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.uint8]
OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def numbers(rank: int, count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in every type."""
    return ((torch.arange(count) * (rank + 1) + rank) % 4 + 1).to(dtype)


def reductions(rank: int, size: int, folder: Path) -> Any:
    results: dict[str, Any] = {}
    for op in OPS:
        for dtype in [*FLOATS, *INTEGERS]:
            if op[0] == "B" and dtype.is_floating_point:
                continue
            tensor = numbers(rank, dtype=dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            results[f"all_reduce {op} {dtype}"] = tensor
            tensor = numbers(rank, dtype=dtype)
            dist.reduce(tensor, size - 1, getattr(dist.ReduceOp, op))
            if rank == size - 1:
                results[f"reduce {op} {dtype}"] = tensor
    return results


def collectives(asynchronous: bool, rank: int, size: int, folder: Path) -> Any:
    """Each collective once. What has a list has it of tensors that do not look alike in memory."""
    results: dict[str, Any] = {}

    def do(call: Any, *arguments: Any, **options: Any) -> None:
        work = call(*arguments, async_op=asynchronous, **options)
        if asynchronous:
            work.wait()

    results["broadcast"] = numbers(rank)
    do(dist.broadcast, results["broadcast"], 1)
    results["all_gather"] = [torch.zeros(6) for _ in range(size)]
    do(dist.all_gather, results["all_gather"], numbers(rank))
    results["all_gather_into_tensor"] = torch.zeros(size * 6)
    do(dist.all_gather_into_tensor, results["all_gather_into_tensor"], numbers(rank))
    results["gather"] = [torch.zeros(6) for _ in range(size)] if rank == 1 else None
    do(dist.gather, numbers(rank), results["gather"], dst=1)
    results["scatter"] = torch.zeros(6)
    do(dist.scatter, results["scatter"], [numbers(r) for r in range(size)] if rank == 0 else None, src=0)
    results["reduce_scatter"] = torch.zeros(4)
    do(dist.reduce_scatter, results["reduce_scatter"], [numbers(rank + r, 4) for r in range(size)])
    results["reduce_scatter_tensor"] = torch.zeros(4)
    do(dist.reduce_scatter_tensor, results["reduce_scatter_tensor"], numbers(rank, 4 * size))
    results["all_to_all"] = [torch.zeros(3) for _ in range(size)]
    do(dist.all_to_all, results["all_to_all"], [numbers(rank + r, 3) for r in range(size)])
    results["all_to_all_single"] = torch.zeros(2 * size)
    do(dist.all_to_all_single, results["all_to_all_single"], numbers(rank, 2 * size))
    sent, received = [(rank + r) % 3 for r in range(size)], [(rank + r) % 3 for r in range(size)]
    results["all_to_all_single uneven"] = torch.zeros(sum(received), 2)
    rows = numbers(rank, 2 * sum(sent)).reshape(-1, 2)
    do(dist.all_to_all_single, results["all_to_all_single uneven"], rows, received, sent)
    do(dist.barrier)
    return results


def many_at_once(rank: int, size: int, folder: Path) -> Any:
    """Futures, callbacks, and calls that are waited for in another order than they were made."""
    tensors = [numbers(rank + step, 1000 + step) for step in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = works[3].get_future().then(lambda future: future.value()[0] * 2)
    for work in reversed(works):
        work.wait()
    return tensors, doubled.wait(), [work.is_completed() for work in works]


def coalesced(rank: int, size: int, folder: Path) -> Any:
    tensors = [numbers(rank, 3), numbers(rank, 5)]
    dist.all_reduce_coalesced(tensors)
    gathered = [[torch.zeros(3), torch.zeros(5)] for _ in range(size)]
    dist.all_gather_coalesced(gathered, [numbers(rank, 3), numbers(rank, 5)])
    first, second = numbers(rank, 3), numbers(rank, 5)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(first)
        dist.all_reduce(second)
    manager.wait()
    return tensors, gathered, first, second


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


def many_shapes(rank: int, size: int, folder: Path) -> Any:
    """Nothing at all, zero dimensions, strided and many-dimensional tensors."""
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    shaped = [torch.zeros(2, 3, 4) for _ in range(size)]
    dist.all_gather(shaped, numbers(rank, 24).reshape(2, 3, 4))
    channels = numbers(rank, 48).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    dist.all_reduce(channels)
    complex_numbers = torch.complex(numbers(rank), numbers(rank + 1))
    dist.all_reduce(complex_numbers)
    truth = torch.tensor([rank == 0, rank == 1, False])
    dist.broadcast(truth, 1)
    return empty, scalar, shaped, channels, complex_numbers, truth


def sparse(rank: int, size: int, folder: Path) -> Any:
    places = torch.tensor([[rank, rank + 1]])
    tensor = torch.sparse_coo_tensor(places, torch.ones(2, 3) * (rank + 1), (size + 1, 3))
    dist.all_reduce(tensor)
    return tensor.coalesce()


PROGRAMS: dict[str, Any] = {
    "reductions": (3, reductions),
    "collectives": (3, partial(collectives, False)),
    "collectives, asynchronous": (3, partial(collectives, True)),
    "many calls at once": (2, many_at_once),
    "coalesced calls": (3, coalesced),
    "functional average": (2, average),
    "functional collectives": (3, functional_collectives),
    "functional collectives with autograd": (2, functional_with_autograd),
    "functional collectives compiled": (2, compiled),
    "tensors of many shapes": (3, many_shapes),
    "sparse tensors": (3, sparse),
}
