"""Calls of every operation, with tensors of every kind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from operation_table import EVERY_RANK, OPERATIONS
from seeded_cases import Case, TorchPart
from torch_plugin.call_table import call, values

import procgroup


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
    assert [device.type for device in world._device_types] == ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
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
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        counts = torch.tensor([rank, rank + 1, torch.iinfo(dtype).max], dtype=dtype)
        dist.all_reduce(counts, dist.ReduceOp.AVG)
        assert counts.tolist() == [1, 2, torch.iinfo(dtype).max], dtype
    below = torch.tensor([-7 if rank == 0 else 0])
    dist.all_reduce(below, dist.ReduceOp.AVG)  # -7 / 3, truncated toward zero
    assert below.tolist() == [-2]
    with pytest.raises(ValueError, match="AVG is not defined for bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
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
def every_operation_takes_arrays_of_any_layout(rank: int, size: int) -> None:
    for name in (name for name in EVERY_RANK if OPERATIONS[name].in_torch):
        for turn, dtype in enumerate(["float32", "bfloat16", "int16", "uint64", "complex64", "bool"]):
            layouts = ("offset", "transposed", "column", "steps", "flat")[turn % 3 :]
            case = Case(name, dtype, 40 * turn, "AVG" if turn < 2 else "SUM", turn % size, layouts=layouts)
            part = TorchPart(case, rank, size)
            part.is_flat = name.endswith("_single")  # torch looks at the shapes
            part.start(dist, async_op=turn % 2 == 1)
            part.wait()
            assert not part.wrong(), f"{case}: {part.wrong()}"


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
    if base.is_cuda:
        with pytest.raises(procgroup.ArgumentError, match="is not contiguous"):
            dist.all_reduce(base[:, ::2])
    else:
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
