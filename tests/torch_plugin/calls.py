"""What a PyTorch program may call on 3 ranks of backend "procgroup", each with what must come of it.

Every function takes this rank and the number of ranks, and stands for one test; all run in one world.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import procgroup

CALLS: dict[str, Any] = {}


def call(function: Any) -> Any:
    CALLS[function.__name__] = function
    return function


def make(
    rank: int,
    size: int,
    left_out: frozenset[str] = frozenset(),
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, str]:
    """Make the calls, one after the other, until one fails; return what went wrong, "" for nothing, by their names."""
    became = {}
    for name, function in CALLS.items():
        if name in left_out:
            continue
        try:
            with surroundings():
                function(rank, size)
            became[name] = ""
        except (Exception, pytest.fail.Exception):
            became[name] = traceback.format_exc()
            break  # the ranks may be out of step
    return became


def require_success(name: str, of_ranks: list[dict[str, str]]) -> None:
    """Fail where a call went wrong on any rank, and where it was not made because of an earlier one."""
    failed = {rank: became.get(name, "not made: an earlier call failed") for rank, became in enumerate(of_ranks)}
    texts = [f"\nrank {rank}: {text}" for rank, text in failed.items() if text]
    assert not texts, "".join(texts)


def values(rank: int, *shape: int, dtype: Any = torch.float32) -> Any:
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) + 10 * rank).to(dtype)


@call
def the_backend_answers_by_its_name(rank: int, size: int) -> None:
    assert dist.get_backend() == "procgroup"
    assert dist.get_rank() == rank
    assert dist.get_world_size() == size
    world = dist.group.WORLD
    assert world.name() == "procgroup"
    assert world.rank() == rank
    assert world.size() == size
    assert world.group_name == "0"
    assert world.group_desc == "default_pg"
    assert world._device_types == [torch.device("cpu")]
    assert isinstance(world.get_group_store(), dist.Store)
    assert isinstance(world.group, procgroup.ProcessGroup)
    assert repr(world) == f"<TorchProcessGroup 0: procgroup, rank {rank} of {size}>"


@call
def all_reduce_combines_by_every_op(rank: int, size: int) -> None:
    ops = {
        dist.ReduceOp.SUM: 6,
        dist.ReduceOp.PRODUCT: 6,
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.MAX: 3,
        dist.ReduceOp.BAND: 0,
        dist.ReduceOp.BOR: 3,
        dist.ReduceOp.BXOR: 0,
    }
    for op, expected in ops.items():
        tensor = torch.full((5,), rank + 1)
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == [expected] * 5, op
    mean = torch.full((2,), rank + 1.0)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.tolist() == [2.0, 2.0]
    scaled = torch.full((2,), rank + 1.0)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert scaled.tolist() == [3.0, 3.0]
    scaled = torch.full((2,), rank + 1.0)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(torch.tensor([0.25], device="cpu")))
    assert scaled.tolist() == [1.5, 1.5]
    for wrong in ("sum", dist.ReduceOp.PREMUL_SUM):  # which needs a factor
        with pytest.raises(TypeError):
            dist.all_reduce(scaled, wrong)


@call
def every_dtype_is_right(rank: int, size: int) -> None:
    whole = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    for dtype in (*whole, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        tensor = torch.full((7,), rank + 1).to(dtype)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((7,), 6).to(dtype)), dtype
    flag = torch.tensor([rank == 1, False])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    assert flag.tolist() == [True, False]


@call
def strided_empty_and_zero_dimensional_tensors_are_right(rank: int, size: int) -> None:
    base = torch.zeros(4, 6)
    base[:, ::2] = rank + 1
    dist.all_reduce(base[:, ::2])
    assert base[:, ::2].eq(6).all() and base[:, 1::2].eq(0).all()
    turned = values(rank, 2, 3).t()
    dist.broadcast(turned, 1)
    assert torch.equal(turned, values(1, 2, 3).t())
    number = torch.tensor(float(rank))
    dist.all_reduce(number)
    assert number.item() == 3.0
    nothing = torch.zeros(0, 3)
    dist.all_reduce(nothing)
    assert nothing.shape == (0, 3)
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    dist.all_reduce(parameter.grad if parameter.grad is not None else parameter.data)
    assert parameter.tolist() == [3.0, 3.0]


@call
def sparse_tensors_are_summed_where_indices_differ(rank: int, size: int) -> None:
    mine = torch.sparse_coo_tensor([[rank, 3, rank]], torch.ones(3, 2), (5, 2), check_invariants=True)
    dist.all_reduce(mine)
    expected = torch.tensor([2.0, 2.0, 2.0, 3.0, 0.0]).unsqueeze(1).expand(5, 2)
    assert torch.equal(mine.to_dense(), expected)
    with pytest.raises(procgroup.ArgumentError, match="can be summed only"):
        dist.all_reduce(mine, dist.ReduceOp.MAX)
    with pytest.raises(TypeError, match="sparse_csr"):
        dist.all_reduce(torch.eye(2).to_sparse_csr())
    wider = torch.sparse_coo_tensor([[0]], torch.ones(1), (5 + (rank == 1),), check_invariants=True)
    with pytest.raises(procgroup.ArgumentError, match=rf"on rank {rank}: .* shape \([56],\), that of rank . has 1 and"):
        dist.all_reduce(wider)
    dist.all_reduce(mine)  # the ranks are in step


@call
def broadcast_and_reduce_have_a_root(rank: int, size: int) -> None:
    tensor = values(rank, 4)
    dist.broadcast(tensor, src=2)
    assert torch.equal(tensor, values(2, 4))
    tensor = torch.full((3,), rank + 1)
    dist.reduce(tensor, dst=1)
    assert tensor.tolist() == ([6, 6, 6] if rank == 1 else [rank + 1] * 3)


@call
def all_gather_takes_pieces_of_other_sizes(rank: int, size: int) -> None:
    outputs = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
    assert [output.tolist() for output in outputs] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
    single = torch.zeros(2 * size)
    dist.all_gather_into_tensor(single, values(rank, 2))
    assert single.tolist() == [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]
    lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [values(rank, 2), values(rank, 1)])
    assert [[tensor.tolist() for tensor in entry] for entry in lists] == [
        [[10.0 * r, 10.0 * r + 1], [10.0 * r]] for r in range(size)
    ]


@call
def gather_and_scatter_use_lists_on_the_root_alone(rank: int, size: int) -> None:
    outputs = [torch.zeros(2) for _ in range(size)] if rank == 1 else None
    dist.gather(values(rank, 2), outputs, dst=1)
    assert outputs is None or [output.tolist() for output in outputs] == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]
    options = dist.GatherOptions()
    options.rootRank = 1
    single = torch.zeros(size, 2) if rank == 1 else torch.zeros(0)
    dist.group.WORLD.gather_single(single, values(rank, 2), options).wait()
    assert rank != 1 or single.tolist() == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]
    tensor = torch.zeros(2)
    dist.scatter(tensor, [values(r, 2) for r in range(size)] if rank == 2 else None, src=2)
    assert torch.equal(tensor, values(rank, 2))


@call
def reduce_scatter_hands_each_rank_its_part(rank: int, size: int) -> None:
    inputs = [torch.full((r + 1,), rank + 1.0) for r in range(size)]
    output = torch.zeros(rank + 1)
    dist.reduce_scatter(output, inputs)
    assert output.tolist() == [6.0] * (rank + 1)
    single = torch.zeros(2)
    dist.reduce_scatter_tensor(single, torch.arange(6.0) * (rank + 1))
    assert single.tolist() == [6.0 * 2 * rank, 6.0 * (2 * rank + 1)]


@call
def all_to_all_exchanges_even_and_uneven_pieces(rank: int, size: int) -> None:
    outputs = [torch.zeros(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((r + 1,), float(rank)) for r in range(size)])
    assert [output.tolist() for output in outputs] == [[float(r)] * (rank + 1) for r in range(size)]
    output = torch.zeros(3, 2)
    dist.all_to_all_single(output, values(rank, 3, 2))
    assert output.tolist() == [[2.0 * rank + 10 * r, 2.0 * rank + 10 * r + 1] for r in range(size)]
    uneven = torch.zeros((rank + 1) * size)
    mine = torch.cat([torch.full((r + 1,), float(rank)) for r in range(size)])
    dist.all_to_all_single(uneven, mine, [rank + 1] * size, [r + 1 for r in range(size)])
    assert uneven.tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]


@call
def messages_go_between_two_ranks_and_from_any(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    tensor = torch.zeros(3)
    sending = dist.isend(values(rank, 3), after, tag=5)
    receiving = dist.irecv(tensor, before, tag=5)
    receiving.wait()
    sending.wait()
    assert torch.equal(tensor, values(before, 3))
    assert receiving._source_rank() == before
    if rank == 0:
        sources = sorted(dist.recv(torch.zeros(1), tag=9) for _ in range(size - 1))
        assert sources == [1, 2]
    else:
        dist.send(torch.ones(1), 0, tag=9)
    big = torch.full((300_000,), float(rank))
    received = torch.zeros(300_000)
    operations = [dist.P2POp(dist.isend, big, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.eq(before).all()


@call
def an_asynchronous_call_has_a_work_and_a_future(rank: int, size: int) -> None:
    tensor = torch.full((4,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(seconds=20))
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result() == [tensor]
    for wait in ("synchronize", "block_current_stream"):
        if rank == 1:
            time.sleep(0.1)  # what does not wait for this rank is not over yet
        work = dist.barrier(async_op=True)
        getattr(work, wait)()
        assert work.is_completed() and work.is_success()
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] / 2).wait().tolist() == [9.0] * 4
    with pytest.raises(RuntimeError, match="sourceRank"):
        work.source_rank()
    assert dist.barrier(async_op=True).wait()


@call
def blocking_calls_of_the_group_return_a_work_that_is_over(rank: int, size: int) -> None:
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
    made = [record["call"] for record in dist.group.WORLD.group._backend.records()]
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
        assert pair.group._backend.__class__.__name__ == "NativeSubgroup"
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
    assert "all_reduce" in str(dist.group.WORLD.group._backend.records()[-1])


@call
def tensors_of_other_devices_go_to_their_backend_or_are_refused(rank: int, size: int) -> None:
    with pytest.raises(procgroup.DistBackendError, match="lies on meta. It has no elements: make it on the CPU"):
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
