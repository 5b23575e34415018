"""Every collective on torch tensors, each with what it leaves on this rank.

python -m procgroup run --nproc-per-node 3 examples/torch_collectives.py
"""

import torch

import procgroup as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def show(call: str, result: object) -> None:
    print(f"rank {rank}: {call}: {result}")


def row(start: int = 0) -> torch.Tensor:
    """Return one number per rank: 0, 1, 2 on rank 0, and 10, 11, 12 on rank 1."""
    return torch.arange(size) + 10 * rank + start


def empty_rows() -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.int64) for _ in range(size)]


tensor = row()
dist.broadcast(tensor, src=1)
show("broadcast from 1", tensor.tolist())

for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
    tensor = row(start=1)
    dist.all_reduce(tensor, op=op)
    show(f"all_reduce {op.name}", tensor.tolist())
for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
    bits = torch.tensor([0b1000 | 1 << rank], dtype=torch.uint8)
    dist.all_reduce(bits, op=op)
    show(f"all_reduce {op.name}", f"{bits.item():04b}")
mean = torch.tensor([float(rank)], dtype=torch.float16)
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
show("all_reduce AVG", mean.tolist())

tensor = row()
dist.reduce(tensor, dst=0)
if rank == 0:
    show("reduce to 0", tensor.tolist())

rows = empty_rows()
dist.all_gather(rows, row())
show("all_gather", [tensor.tolist() for tensor in rows])

gathered = empty_rows() if rank == 0 else None
dist.gather(row(), gathered, dst=0)
if gathered is not None:
    show("gather to 0", [tensor.tolist() for tensor in gathered])

tensor = torch.empty(2)
dist.scatter(tensor, [torch.full((2,), part + 0.5) for part in range(size)] if rank == 0 else None, src=0)
show("scatter from 0", tensor.tolist())

tensor = torch.empty(1, dtype=torch.int64)
dist.reduce_scatter(tensor, list(row().split(1)))
show("reduce_scatter", tensor.tolist())

parts = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
dist.all_to_all(parts, list(row().split(1)))
show("all_to_all", [part.item() for part in parts])

# The same with one tensor that has all parts.
whole = torch.empty(size * size, dtype=torch.int64)
dist.all_gather_single(whole, row())
exchanged = torch.empty(size, dtype=torch.int64)
dist.all_to_all_single(exchanged, row())
reduced = torch.empty(1, dtype=torch.int64)
dist.reduce_scatter_single(reduced, row())
show("in one tensor", (whole.tolist(), exchanged.tolist(), reduced.tolist()))

# In a group of the first two ranks. Every rank makes it, its members use it.
pair = dist.new_group([0, 1])
if rank < 2:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=pair)
    show("all_reduce in a group of two", tensor.tolist())
dist.barrier()
dist.destroy_process_group()
