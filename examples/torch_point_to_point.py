"""Messages of torch tensors: send and recv, isend and irecv, several at once, and a column in place.

python -m procgroup run --nproc-per-node 2 examples/torch_point_to_point.py
"""

import torch

import procgroup as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 2
other = 1 - rank

number = torch.zeros(1)
if rank == 0:
    number += 1
    dist.send(number, dst=1)
else:
    dist.recv(number, src=0)
print(f"rank {rank} has {number.item():g}")

# isend and irecv return at once. Leave the tensor alone until wait() returns.
number = torch.zeros(1, dtype=torch.bfloat16)
if rank == 0:
    number += 2
    work = dist.isend(number, dst=1)
else:
    work = dist.irecv(number, src=0)
work.wait()
assert work.is_completed()
print(f"rank {rank} has {number.item():g} as {number.dtype}")

# Both send and both receive: in a batch nobody has to go first.
mine, theirs = torch.full((1000,), float(rank)), torch.empty(1000)
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]):
    work.wait()
assert (theirs == other).all()

# A column of a matrix is not contiguous. It is sent and received without a copy by the program.
matrix = torch.arange(12.0).reshape(3, 4) if rank == 0 else torch.zeros(3, 4)
column = matrix[:, 1]
if rank == 0:
    dist.send(column, dst=1, tag=7)
else:
    dist.recv(column, src=0, tag=7)
print(f"rank {rank} has the column {matrix[:, 1].tolist()}, and in all {matrix.sum().item():g}")
dist.destroy_process_group()
