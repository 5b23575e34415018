"""Programs of what shards: FSDP1 and FSDP2, DTensor and tensor parallelism."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from parity.torch_programs_ddp import batch, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

STEPS = 3


class Block(nn.Module):
    """Two layers with a residual."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 12)
        self.down = nn.Linear(12, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(count)))


def train(model: nn.Module, rank: int, *, clip: bool = False) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(batch(rank, step)))
        loss.backward()
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            losses.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        losses.append(loss.detach())
    return optimizer, losses


def fsdp1(strategy: ShardingStrategy, rank: int, size: int, folder: Path, **options: Any) -> Any:
    if strategy is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh(
            torch.get_default_device().type, (2, size // 2), mesh_dim_names=("copies", "shards")
        )
    model = FullyShardedDataParallel(
        blocks(),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.get_default_device(),
        **options,
    )
    _, losses = train(model, rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return losses, [parameter.detach().clone() for parameter in model.parameters()]


def fsdp1_accumulating(rank: int, size: int, folder: Path) -> Any:
    model = FullyShardedDataParallel(
        blocks(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.get_default_device(), use_orig_params=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        loss_of(model(batch(rank, 0))).backward()
    loss_of(model(batch(rank, 1))).backward()
    norm = model.clip_grad_norm_(0.5)
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return norm, [parameter.detach().clone() for parameter in model.parameters()]


def sharded(shape: tuple[int, ...], **options: Any) -> nn.Module:
    """Shard each block and the whole, on a mesh of this shape."""
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    model = blocks()
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2(shape: tuple[int, ...], rank: int, size: int, folder: Path, **options: Any) -> Any:
    model = sharded(shape, **options)
    _, losses = train(model, rank, clip=True)
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), model.state_dict()


def fsdp2_compiled(rank: int, size: int, folder: Path) -> Any:
    model = torch.compile(sharded((size,)), backend="aot_eager")
    _, losses = train(model, rank)
    return losses, list(model.parameters())


def fsdp2_accumulating(rank: int, size: int, folder: Path) -> Any:
    model: Any = sharded((size,))
    model.set_requires_gradient_sync(False)
    loss_of(model(batch(rank, 0))).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model(batch(rank, 1))).backward()
    return [parameter.grad for parameter in model.parameters()]


def tensor_parallel(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    model = blocks(2)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _, losses = train(model, 0)
    return losses, [parameter.full_tensor() for parameter in model.parameters() if isinstance(parameter, DTensor)]


def sequence_parallel(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    torch.manual_seed(3)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8))
    parallelize_module(
        model,
        mesh,
        {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        },
    )
    x = torch.randn(2, 4 * size, 8, generator=torch.Generator().manual_seed(5))
    out = model(distribute_tensor(x, mesh, [Shard(1)]).to_local())
    loss = loss_of(out.full_tensor())
    loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()]


def parallel_loss(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    torch.manual_seed(3)
    model = nn.Linear(8, 6)
    parallelize_module(model, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(batch(0, 0)), torch.arange(6) % 6)
        loss.backward()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss, [p.grad for p in model.parameters()]


def parallel_in_two_ways(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh(torch.get_default_device().type, (2, size // 2), mesh_dim_names=("data", "tensor"))
    model = blocks(2)
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    _, losses = train(model, rank // (size // 2))
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def redistributed(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    whole = torch.arange(7.0 * 6).reshape(7, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    partial_sums = DTensor.from_local(torch.full((4, 6), float(rank)), mesh, [Partial()])
    return {
        "rows": rows,
        "columns": rows.redistribute(mesh, [Shard(1)]),
        "copies": rows.redistribute(mesh, [Replicate()]),
        "summed": partial_sums.redistribute(mesh, [Replicate()]),
        "summed rows": partial_sums.redistribute(mesh, [Shard(0)]),
        "product": (rows @ distribute_tensor(whole.T.contiguous(), mesh, [Shard(1)])).full_tensor(),
        "mean": rows.mean().full_tensor(),
        "random": distribute_tensor(torch.ones(5, 5) * rank, mesh, [Replicate()]).full_tensor(),
    }


def moved_on_two_axes(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh(torch.get_default_device().type, (2, size // 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(8.0 * 4).reshape(8, 4)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    moved = tensor.redistribute(mesh, [Shard(1), Shard(0)])
    return [tensor, moved, tensor.full_tensor(), (tensor * 2).sum().full_tensor()]


_BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
_HALF = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
PROGRAMS: dict[str, Any] = {
    "fsdp1 full shard": (2, partial(fsdp1, ShardingStrategy.FULL_SHARD)),
    "fsdp1 shard grad op": (3, partial(fsdp1, ShardingStrategy.SHARD_GRAD_OP)),
    "fsdp1 no shard": (2, partial(fsdp1, ShardingStrategy.NO_SHARD)),
    "fsdp1 hybrid shard": (4, partial(fsdp1, ShardingStrategy.HYBRID_SHARD)),
    "fsdp1 in bfloat16": (2, partial(fsdp1, ShardingStrategy.FULL_SHARD, **_HALF)),
    "fsdp1 accumulating": (2, fsdp1_accumulating),
    "fsdp2": (2, partial(fsdp2, (2,))),
    "fsdp2 of 3 ranks": (3, partial(fsdp2, (3,))),
    "fsdp2 kept after forward": (2, partial(fsdp2, (2,), reshard_after_forward=False)),
    "fsdp2 in bfloat16": (2, partial(fsdp2, (2,), **_BF16)),
    "fsdp2 hybrid": (4, partial(fsdp2, (2, 2))),
    "fsdp2 compiled": (2, fsdp2_compiled),
    "fsdp2 accumulating": (2, fsdp2_accumulating),
    "tensor parallel": (2, tensor_parallel),
    "tensor parallel of 4 ranks": (4, tensor_parallel),
    "sequence parallel": (2, sequence_parallel),
    "loss parallel": (2, parallel_loss),
    "tensor parallel and fsdp2": (4, parallel_in_two_ways),
    "dtensor redistributed": (3, redistributed),
    "dtensor on two axes": (4, moved_on_two_axes),
}
