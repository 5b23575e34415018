"""Programs of groups, meshes and objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity.torch_programs_collectives import numbers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def subgroups(rank: int, size: int, folder: Path) -> Any:
    mine, _ = dist.new_subgroups(2)
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    results = []
    for group in (mine, crossed):
        tensor = numbers(rank)
        dist.all_reduce(tensor, group=group)
        results.append([tensor, dist.get_process_group_ranks(group)])
    return results


def group_of_members_only(rank: int, size: int, folder: Path) -> Any:
    if rank == 1:
        return "not a member"
    group = dist.new_group([0, 2], use_local_synchronization=True)
    tensor = numbers(rank)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    return tensor


def meshes(rank: int, size: int, folder: Path) -> Any:
    mesh = init_device_mesh(torch.get_default_device().type, (2, size // 2), mesh_dim_names=("data", "model"))
    results: list[Any] = [mesh.get_coordinate(), mesh.get_local_rank("data"), mesh.get_local_rank("model")]
    for name in ("data", "model"):
        tensor = numbers(rank)
        dist.all_reduce(tensor, group=mesh.get_group(name))
        results += [tensor, dist.get_process_group_ranks(mesh[name].get_group()), mesh[name].size()]
    flat = mesh["data", "model"]._flatten("all")
    tensor = numbers(rank)
    dist.all_reduce(tensor, group=flat.get_group())
    return [*results, tensor]


def objects(rank: int, size: int, folder: Path) -> Any:
    mine = {"rank": rank, "values": [rank] * (rank + 1), "tensor": numbers(rank)}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine)
    at_one: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(mine, at_one, dst=1)
    sent: list[Any] = [mine, "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent, src=0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [{"to": r} for r in range(size)] if rank == 0 else None, src=0)
    passed: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([mine], dst=1)
    elif rank == 1:
        dist.recv_object_list(passed, src=0)
    return gathered, at_one, sent, scattered, passed


def averaged_models(rank: int, size: int, folder: Path) -> Any:
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    averager = HierarchicalModelAverager({2: 2, 4: size}, warmup_steps=0)
    loss_sum = sum(parameter.sum() for parameter in model.parameters())
    torch.autograd.backward(loss_sum)  # those without a gradient are left out
    for _ in range(4):
        averager.average_parameters(model.parameters())
    return list(model.parameters())


PROGRAMS: dict[str, Any] = {
    "subgroups": (4, subgroups),
    "group of members only": (3, group_of_members_only),
    "meshes": (4, meshes),
    "objects": (3, objects),
    "averaged models": (4, averaged_models),
}
