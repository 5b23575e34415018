"""Programs of stock DistributedDataParallel: what it can do, on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
SMALL_BUCKETS = 0.0005
"""MiB: so that even these models have several buckets."""


class Network(nn.Module):
    """Layers of different sizes, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.middle(x))
        out: torch.Tensor = self.last(torch.relu(self.middle(x)))
        return out


class Branches(nn.Module):
    """Each step uses another layer, and on each rank another one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])
        self.common = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        out: torch.Tensor = self.common(self.branches[branch](x))
        return out


class Embedding(nn.Module):
    """A table whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 100).long() % 20
        out: torch.Tensor = self.last(self.table(words).mean(dim=1))
        return out


class Normed(nn.Module):
    """With buffers, of which those of the first rank are sent to all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)))
        return out


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 8, generator=generator, device="cpu").to(torch.get_default_device())


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out * out).mean()


def outcome(model: nn.Module, losses: Iterable[torch.Tensor]) -> Any:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {"losses": list(losses), "state": model.state_dict(), "gradients": gradients}


def train(
    model: nn.Module, rank: int, *, micro: int = 1, arguments: Callable[[int], tuple[Any, ...]] = lambda step: ()
) -> Any:
    """Take some steps, each of so many batches of which the last one synchronises."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            with model.no_sync() if part < micro - 1 else nullcontext():  # type: ignore[operator]
                loss = loss_of(model(batch(rank, step * micro + part), *arguments(step)))
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return outcome(model, losses)


def plain(model: Callable[[], nn.Module], rank: int, size: int, folder: Path, **options: Any) -> Any:
    torch.manual_seed(rank)  # the first rank's parameters are everybody's
    return train(DistributedDataParallel(model(), **options), rank)


def unused_parameters(rank: int, size: int, folder: Path) -> Any:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=SMALL_BUCKETS)
    return train(model, rank, arguments=lambda step: ((rank + step) % 3,))


def no_sync(rank: int, size: int, folder: Path) -> Any:
    return train(DistributedDataParallel(Network()), rank, micro=3)


def with_hook(hook: Any, state: Callable[[], Any], rank: int, size: int, folder: Path) -> Any:
    model = DistributedDataParallel(Network(), bucket_cap_mb=SMALL_BUCKETS)
    model.register_comm_hook(state(), hook)
    return train(model, rank)


# DistributedDataParallel looks at annotations, and takes no strings for them.
def compress_to_bfloat16(state, bucket):  # type: ignore[no-untyped-def]
    """Do what bf16_compress_hook does, which DistributedDataParallel accepts with NCCL only."""
    return default_hooks._compress_hook(torch.bfloat16, dist.group.WORLD, bucket)


def power_sgd(rank: int, size: int, folder: Path) -> Any:
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model = DistributedDataParallel(Network())
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, rank)


def post_local_sgd(rank: int, size: int, folder: Path) -> Any:
    model = DistributedDataParallel(Network())
    state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, dist.group.WORLD, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        losses.append(loss_of(model(batch(rank, step))))
        losses[-1].backward()
        optimizer.step()
    return outcome(model, losses)


def uneven_inputs(rank: int, size: int, folder: Path) -> Any:
    model = DistributedDataParallel(Network(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with model.join():
        for step in range(2 + 2 * rank):
            losses.append(loss_of(model(batch(rank, step))))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return outcome(model, losses)


def uneven_inputs_with_sharded_optimizer(rank: int, size: int, folder: Path) -> Any:
    model = DistributedDataParallel(Network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = []
    with Join([model, optimizer]):
        for step in range(3 + rank):
            optimizer.zero_grad()
            losses.append(loss_of(model(batch(rank, step))))
            losses[-1].backward()
            optimizer.step()
    return outcome(model, losses)


def sharded_optimizer(rank: int, size: int, folder: Path) -> Any:
    model = DistributedDataParallel(Network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(loss_of(model(batch(rank, step))))
        losses[-1].backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    return [outcome(model, losses), {number: values["exp_avg"] for number, values in state.items()}]


def in_half_of_the_ranks(rank: int, size: int, folder: Path) -> Any:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(Network(), process_group=halves[rank // 2])
    return train(model, rank)


def compiled(rank: int, size: int, folder: Path) -> Any:
    return train(torch.compile(DistributedDataParallel(Network()), backend="aot_eager"), rank)


def profiled(rank: int, size: int, folder: Path) -> Any:
    model = DistributedDataParallel(Network())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return train(model, rank)


def logged(rank: int, size: int, folder: Path) -> Any:
    model = DistributedDataParallel(Network())
    train(model, rank)
    names = ["world_size", "rank", "module_name", "bucket_sizes", "has_error", "iteration", "comm_hook"]
    data = model._get_ddp_logging_data()
    return {name: str(data.get(name)) for name in names}


_hook = with_hook
PROGRAMS: dict[str, tuple[int, Any]] = {
    "ddp": (2, partial(plain, Network)),
    "ddp of small buckets": (2, partial(plain, Network, bucket_cap_mb=SMALL_BUCKETS)),
    "ddp of 3 ranks": (3, partial(plain, Network, bucket_cap_mb=SMALL_BUCKETS)),
    "ddp with find_unused_parameters": (2, unused_parameters),
    "ddp with static_graph": (2, partial(plain, Network, static_graph=True)),
    "ddp with no_sync": (2, no_sync),
    "ddp with gradient_as_bucket_view": (2, partial(plain, Network, gradient_as_bucket_view=True)),
    "ddp of batch norm": (2, partial(plain, Normed)),
    "ddp of a sparse embedding": (2, partial(plain, Embedding)),
    "ddp with the all_reduce hook": (2, partial(_hook, default_hooks.allreduce_hook, lambda: None)),
    "ddp with fp16_compress_hook": (2, partial(_hook, default_hooks.fp16_compress_hook, lambda: None)),
    "ddp with a hook that compresses to bfloat16": (2, partial(_hook, compress_to_bfloat16, lambda: None)),
    "ddp with PowerSGD": (2, power_sgd),
    "ddp with post-local SGD": (2, post_local_sgd),
    "ddp join of uneven inputs": (2, uneven_inputs),
    "ddp join with ZeroRedundancyOptimizer": (2, uneven_inputs_with_sharded_optimizer),
    "ddp with ZeroRedundancyOptimizer": (2, sharded_optimizer),
    "ddp in half of the ranks": (4, in_half_of_the_ranks),
    "ddp compiled": (2, compiled),
    "ddp with a profiler": (2, profiled),
    "ddp logging": (2, logged),
}
