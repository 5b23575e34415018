"""Programs of groups, meshes, objects, messages and barriers."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity.torch_programs_collectives import numbers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def groups(rank: int, size: int, folder: Path) -> Any:
    results: list[Any] = []
    for ranks in ([0, 1], [1, 3], [2, 0], None):
        group = dist.new_group(ranks, timeout=timedelta(seconds=20))
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            tensor = numbers(rank)
            dist.all_reduce(tensor, group=group)
            root = dist.get_global_rank(group, 1)
            sent = numbers(rank)
            dist.broadcast(sent, root, group=group)
            facts = [dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)]
            results.append([tensor, sent, facts])
    return results


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


def messages(rank: int, size: int, folder: Path) -> Any:
    """A ring in one batch, messages by tag in another order, and futures of their works."""
    following, former = (rank + 1) % size, (rank - 1) % size
    received = torch.zeros(6)
    batch = [dist.P2POp(dist.isend, numbers(rank), following), dist.P2POp(dist.irecv, received, former)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    tagged = [torch.zeros(3), torch.zeros(3)]
    works = [dist.isend(numbers(rank + tag, 3), following, tag=tag) for tag in (1, 2)]
    works += [dist.irecv(tagged[1], former, tag=2), dist.irecv(tagged[0], former, tag=1)]
    for work in works:
        work.wait()
    return received, tagged


def from_any_source(rank: int, size: int, folder: Path) -> Any:
    if rank != 0:
        dist.send(torch.full((3,), float(rank)), 0)
        return "sent"
    seen = {}
    for _ in range(size - 1):
        tensor = torch.zeros(3)
        source = dist.recv(tensor)
        seen[source] = tensor
    return dict(sorted(seen.items()))


def barriers(rank: int, size: int, folder: Path) -> Any:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    # torch.distributed's function of this name asks for a backend called "gloo".
    _monitored_barrier(timedelta(seconds=20))
    _monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    return "all met"


def _monitored_barrier(timeout: timedelta, *, wait_all_ranks: bool = False) -> None:
    world = dist.group.WORLD
    assert world is not None
    world.monitored_barrier(timeout, wait_all_ranks)


def barrier_that_one_misses(rank: int, size: int, folder: Path) -> Any:
    """The first rank's error names the ranks that did not come."""
    if rank == 1:
        time.sleep(1.5)
        return "late"
    try:
        _monitored_barrier(timedelta(seconds=1))
    except RuntimeError as error:
        return "named" if "ank 1" in str(error) else str(error)
    return "passed"


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


def again(rank: int, size: int, folder: Path) -> Any:
    """Leave and enter the default group three times."""
    backend, results = dist.get_backend(), []
    for attempt in range(3):
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/again-{backend}-{attempt}", size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        results.append(numbers(rank + attempt))
        dist.all_reduce(results[-1])
    return results


PROGRAMS: dict[str, Any] = {
    "groups": (4, groups),
    "subgroups": (4, subgroups),
    "group of members only": (3, group_of_members_only),
    "meshes": (4, meshes),
    "objects": (3, objects),
    "messages": (3, messages),
    "messages from any source": (3, from_any_source),
    "barriers": (3, barriers),
    "barrier that one misses": (2, barrier_that_one_misses),
    "averaged models": (4, averaged_models),
    "groups made again": (2, again),
}
