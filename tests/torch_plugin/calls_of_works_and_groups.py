"""Calls that have works and futures, in other forms and in groups, and what of PyTorch goes around them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_plugin.call_table import call, values

import procgroup


@call
def an_asynchronous_call_has_a_work_and_a_future(rank: int, size: int) -> None:
    tensor = torch.full((4,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(seconds=20))
    if tensor.is_cuda:
        torch.cuda.synchronize()  # only the current stream has waited
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result() == [tensor]
    for wait in ("synchronize", "block_current_stream"):
        if rank == 1:
            time.sleep(0.1)  # what does not wait for this rank has not completed yet
        work = dist.barrier(async_op=True)
        getattr(work, wait)()
        assert work.is_completed() and work.is_success()
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] / 2).wait().tolist() == [9.0] * 4
    with pytest.raises(RuntimeError, match="sourceRank"):
        work.source_rank()
    assert dist.barrier(async_op=True).wait()


@call
def blocking_calls_of_the_group_return_a_completed_work(rank: int, size: int) -> None:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    tensor = torch.ones(2)
    work = dist.group.WORLD.allreduce([tensor], options)
    assert tensor.tolist() == [3.0, 3.0]
    assert work.wait() and work.is_completed() and work.is_success()


@call
def the_group_s_methods_take_every_form_of_torch_s(rank: int, size: int) -> None:
    world = dist.group.WORLD
    tensor = torch.ones(2)
    world.allreduce(tensor, dist.ReduceOp.MAX).wait()
    world.allreduce([tensor], op=dist.ReduceOp.SUM, timeout=timedelta(seconds=20)).wait()
    world.allreduce([tensor]).wait()
    assert tensor.tolist() == [9.0, 9.0]
    world.broadcast(tensor, 1).wait()
    world.broadcast(tensor, root=1, timeout=timedelta(seconds=20)).wait()
    outputs = [torch.zeros(2) for _ in range(size)]
    world.allgather(outputs, tensor).wait()
    world.allgather([outputs], [tensor]).wait()
    assert outputs[2].tolist() == [9.0, 9.0]
    mine = torch.full((1,), rank + 1.0)
    world.reduce(mine, 0, dist.ReduceOp.MAX).wait()
    assert mine.item() == (3.0 if rank == 0 else rank + 1)
    world.gather([torch.zeros(1) for _ in range(size)] if rank == 0 else [], mine, 0).wait()
    world.scatter(mine, [torch.full((1,), r + 5.0) for r in range(size)] if rank == 1 else [], 1).wait()
    assert mine.item() == rank + 5
    world.reduce_scatter(mine, [torch.ones(1) for _ in range(size)], dist.ReduceOp.SUM).wait()
    assert mine.item() == 3
    world.alltoall([torch.zeros(1) for _ in range(size)], [mine] * size).wait()
    world.barrier().wait()
    world.barrier(timeout=timedelta(seconds=20)).wait()
    world.monitored_barrier(timedelta(seconds=20))
    with pytest.raises(ValueError, match="expected a list of 1"):
        world.allreduce([tensor, tensor])


@call
def coalesced_calls_are_one(rank: int, size: int) -> None:
    tensors = [torch.full((n,), rank + 1.0) for n in (1, 4)]
    dist.all_reduce_coalesced(tensors)
    assert [tensor.tolist() for tensor in tensors] == [[6.0], [6.0] * 4]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert tensors[1].tolist() == [18.0] * 4
    if not tensors[0].is_cuda or dist.group.WORLD.group.backends:  # those that are staged go one by one
        made = [record["call"].removesuffix(" on a GPU") for record in dist.group.WORLD.group.records()]
        assert made[-2:] == ["all_reduce(SUM) of 5 float32"] * 2
    outputs = [torch.zeros(size), torch.zeros(2 * size)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, width in zip(outputs, (1, 2), strict=True):
            dist.all_gather_into_tensor(output, values(rank, width))
    manager.wait()
    assert outputs[0].tolist() == [0.0, 10.0, 20.0]
    parts = [torch.zeros(1), torch.zeros(2)]
    with dist._coalescing_manager():
        for part, output in zip(parts, outputs, strict=True):
            dist.reduce_scatter_tensor(part, output)
    assert parts[0].item() == 30.0 * rank


@call
def objects_move_through_torch_s_own_functions(rank: int, size: int) -> None:
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    shared = ["a", 2] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    assert shared == ["a", 2]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(size)) if rank == 0 else None, src=0)
    assert mine == [rank]
    if rank == 0:
        dist.send_object_list(["x"], 1)
    elif rank == 1:
        got = [None]
        dist.recv_object_list(got, 0)
        assert got == ["x"]


@call
def groups_of_some_ranks_share_the_connections(rank: int, size: int) -> None:
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        assert pair.group.engine.__class__.__name__ == "NativeGroup"
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor, group=pair)
        assert tensor.tolist() == [2.0, 2.0]
        assert dist.get_backend(pair) == "procgroup"
        assert dist.get_process_group_ranks(pair) == [0, 2]
        dist.broadcast(tensor, src=2, group=pair)
        if rank == 2:
            dist.send(tensor, 0, group=pair)
        else:
            assert dist.recv(tensor, group=pair) == 2  # from whoever sends: a global rank
        dist.destroy_process_group(pair)
    alone = dist.new_group([1])
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=alone)
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh.get_group("data"))
    assert tensor.item() == size
    halves = dist.group.WORLD.split_group([0, 1] if rank < 2 else [2], group_name=f"half{rank < 2}")
    halves.allreduce(tensor).wait()
    assert tensor.item() == (2 * size if rank < 2 else size)
    assert halves.group_name == f"half{rank < 2}"
    assert halves.group_desc == "default_pg:split"
    rest = dist.group.WORLD.split_group([1, 2], group_desc="all but the first")
    assert (rest is None) == (rank == 0)
    assert rest is None or rest.group_desc == "all but the first"


@call
def functional_collectives_run(rank: int, size: int) -> None:
    from torch.distributed import _functional_collectives as functional

    world = dist.group.WORLD
    assert functional.all_reduce(torch.ones(2) * rank, "sum", world).tolist() == [3.0, 3.0]
    assert functional.all_gather_single(values(rank, 1), 0, world).tolist() == [0.0, 10.0, 20.0]
    assert functional.reduce_scatter_single(torch.ones(3), "sum", 0, world).tolist() == [3.0]
    gathered = functional.all_to_all_single(values(rank, 3), None, None, world)
    assert gathered.tolist() == [rank + 10.0 * r for r in range(size)]
    assert functional.broadcast(torch.full((1,), float(rank)), 2, world).tolist() == [2.0]


@call
def the_profiler_sees_calls_and_shapes(rank: int, size: int) -> None:
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 2))
        dist.all_gather([torch.zeros(4) for _ in range(size)], torch.zeros(4))
    events = {event.name: event.input_shapes for event in profile.function_events}
    assert events["procgroup:all_reduce"] == [[3, 2]]
    assert events["procgroup:all_gather"] == [[4]]


@call
def set_timeout_counts_from_the_next_call(rank: int, size: int) -> None:
    world = dist.group.WORLD
    before = world.group.timeout
    world.set_timeout(timedelta(seconds=30))
    assert world.group.timeout == timedelta(seconds=30)
    world.set_timeout(before)


@call
def the_recorder_sees_torch_s_calls(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(7))
    assert "all_reduce" in str(dist.group.WORLD.group.records()[-1])


@call
def tensors_of_other_devices_go_to_their_backend_or_are_refused(rank: int, size: int) -> None:
    with pytest.raises(procgroup.DistBackendError, match="is on meta. It has no elements: make it on the CPU"):
        dist.all_reduce(torch.ones(1, device="meta"))


@call
def merging_groups_is_refused_in_words(rank: int, size: int) -> None:
    with pytest.raises(procgroup.DistBackendError, match="cannot merge groups"):
        dist.group.WORLD.merge_remote_group(dist.HashStore(), 4)


@call
def a_callback_may_wait_for_another_call(rank: int, size: int) -> None:
    def again(future: Any) -> Any:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    works = [dist.all_reduce(torch.full((1000,), float(rank)), async_op=True) for _ in range(5)]
    totals = [work.get_future().then(again) for work in works]
    assert [total.wait()[0].item() for total in totals] == [9.0] * 5


@call
def the_future_of_sparse_tensors_has_them(rank: int, size: int) -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (size,))
    (total,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert total.to_dense().tolist() == [1.0, 1.0, 1.0]


@call
def the_profiler_shows_calls_as_asynchronous(rank: int, size: int) -> None:
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(2, 3))
    (event,) = [event for event in profile.function_events if event.name == "procgroup:all_reduce"]
    assert event.is_async
    assert event.input_shapes == [[2, 3]]


@call
def a_compiled_model_trains_with_stock_ddp(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = torch.compile(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)), backend="eager")
    for _ in range(2):
        model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[2.0, 2.0]]
