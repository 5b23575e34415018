"""The plug-in on GPUs: which backend takes a tensor, when results are there, and what runs on it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from nccl.gpu_arrays import held
from torch_gpus.plug_in_world import GPUS, SLOW_GPUS, begin

from world import run

pytestmark = pytest.mark.torch
if importlib.util.find_spec("torch") is not None:
    import torch

IN_PLACE = {"PROCGROUP_REPLACE_NCCL": "1"}
BOTH = {**IN_PLACE, "PROCGROUP_REPLACE_GLOO": "1"}


def name_backends(rank: int, size: int, backend: str, moved_by: str) -> None:
    dist = begin(rank, backend)
    tensors = [torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0, device="cuda")]
    for group in (dist.group.WORLD, dist.new_group(), dist.new_group([0, 1])):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    assert [tensor.tolist() for tensor in tensors] == [[12.0] * 3] * 2
    world = dist.group.WORLD
    gpus = world._get_backend(torch.device("cuda"))
    assert list(gpus.group.backends) == ([] if moved_by == "host memory" else ["cuda"]), gpus.group.backends
    assert [device.type for device in world._device_types] == ["cpu", "cuda"]
    assert dist.get_backend() == backend
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "environment", "moved_by"),
    [
        ("procgroup", {}, "NCCL"),
        ("cpu:procgroup,cuda:procgroup", {}, "NCCL"),
        ("nccl", IN_PLACE, "NCCL"),
        ("cpu:gloo,cuda:nccl", IN_PLACE, "NCCL"),
        ("cpu:gloo,cuda:nccl", BOTH, "NCCL"),
        ("cpu:procgroup,cuda:nccl", IN_PLACE, "NCCL"),
        ("gloo", BOTH, "host memory"),
    ],
)
def test_nccl_moves_tensors_on_gpus_but_under_gloo_s_name(
    backend: str, environment: dict[str, str], moved_by: str
) -> None:
    run(name_backends, 2, args=(backend, moved_by), torch="gpus", environment={**GPUS, **environment})


def follow_the_tutorials(rank: int, size: int, name: str, is_eager: bool) -> None:
    """Options, two groups over one store, and a device that is bound to the group."""
    from datetime import timedelta

    import torch.distributed as stock

    world = begin(rank, name, **({"device_id": torch.device("cuda", rank)} if is_eager else {})).group.WORLD
    assert world.bound_device_id == (torch.device("cuda", rank) if is_eager else None)
    backend = world.group.backends["cuda"]
    assert backend._native.device == (rank if is_eager else -1)

    options: Any = {"is_high_priority_stream": True, "min_ctas": 2}
    if name == "nccl":
        options = stock.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.min_ctas = 2
    group = stock.new_group(list(range(size)), backend=name, pg_options=options, timeout=timedelta(seconds=20))
    assert group.group.backends["cuda"]._options == {"is_high_priority_stream": True, "min_ctas": 2}
    tensor = torch.ones(2, device="cuda")
    work = stock.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert tensor.tolist() == [size] * 2
    alone = stock.new_group([0])  # rank 1 is not in it
    if rank == 0:
        stock.all_reduce(tensor, group=alone)
    if is_eager:  # torch's own function and device meshes split only what is bound to a device
        part = stock.split_group(split_ranks=[[0, 1]])
        stock.all_reduce(tensor, group=part)
        assert tensor.tolist() == [size * size] * 2
    mesh = stock.init_device_mesh("cuda", (1, size), mesh_dim_names=("data", "model"))
    stock.all_reduce(tensor, group=mesh.get_group("model"))
    stock.destroy_process_group()


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("name", ["nccl", "procgroup"])
def test_groups_have_options_and_devices_and_are_split_as_torch_s(name: str, is_eager: bool) -> None:
    run(follow_the_tutorials, 2, args=(name, is_eager), torch="gpus", environment={**GPUS, **IN_PLACE})


def use_streams(rank: int, size: int) -> None:
    dist = begin(rank)
    dist.all_reduce(torch.ones(1, device="cuda"))  # connects the ranks
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    source = torch.full((1000,), rank + 1.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        tensor = torch.empty(1000, device="cuda")
        tensor.copy_(source)
        work = dist.all_reduce(tensor, async_op=True)
    with torch.cuda.stream(second):
        work.wait()
        assert tensor.tolist() == [3.0] * 1000
        tensor.copy_(source)
        dist.all_reduce(tensor)  # stays on this stream
        assert tensor.tolist() == [3.0] * 1000
    dist.destroy_process_group()


def test_results_can_be_used_on_the_stream_that_is_current_at_the_wait() -> None:
    run(use_streams, 2, torch="gpus", environment=SLOW_GPUS)


def run_ahead(rank: int, size: int) -> None:
    """Make calls, and take their futures, while the GPU has not begun what comes before them."""
    dist = begin(rank)
    tensor = torch.ones(8, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), held(stream.cuda_stream):
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        assert future.done() and not work.is_completed()
        work.block_current_stream()
        assert not work.is_completed()
        scattered = torch.empty(4, device="cuda")
        dist.reduce_scatter_tensor(scattered, tensor, async_op=True).get_future()
    assert future.wait()[0].tolist() == [8.0] * 8
    assert future.then(lambda future: future.value()[0] * 2).wait().tolist() == [16.0] * 8
    dist.barrier()
    assert scattered.tolist() == [16.0] * 4
    dist.destroy_process_group()


def test_hosts_run_ahead_of_their_gpus_and_futures_are_set_when_a_call_is_queued() -> None:
    run(run_ahead, 2, torch="gpus", environment=GPUS)


def train(rank: int, size: int, backend: str, how: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
    begin(rank, backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Linear(40, 4)
    )
    on_gpu = how.pop("on_gpu")
    if on_gpu:
        model, how = model.cuda(), {"device_ids": [rank], "output_device": rank, **how}
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(5):
        inputs = torch.arange(160.0).reshape(8, 20).sin().add(rank + step)
        loss = model(inputs).square().mean()  # stock DDP moves the inputs
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "how", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str
)
def test_stock_ddp_trains_as_on_gloo(how: dict[str, Any]) -> None:
    on_gloo = run(train, 2, args=("gloo", {**how, "on_gpu": False}), torch="gpus", environment=GPUS)
    on_gpus = run(train, 2, args=("nccl", {**how, "on_gpu": True}), torch="gpus", environment={**SLOW_GPUS, **IN_PLACE})
    for (losses, parameters), (expected, expected_parameters) in zip(on_gpus, on_gloo, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
        for parameter, other in zip(parameters, expected_parameters, strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)
