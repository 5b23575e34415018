"""Groups of ranks: along the rows and columns of a mesh, and of any ranks by number.

    python -m procgroup run --nproc-per-node 4 examples/torch_mesh.py

Every rank makes every group, in the same order, from one thread. Calls in a group may come from any thread, one at a
time.
"""

import torch

import procgroup as dist

mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))  # makes the default group too
rank = dist.get_rank()
print(f"rank {rank} is at {mesh.get_coordinate()} of {mesh.mesh.tolist()}")

# The ranks of a row share one layer: each has some columns of the weights, and all_gather puts the outputs together.
weights = torch.arange(12.0).reshape(3, 4)
mine = weights.chunk(2, dim=1)[mesh.get_local_rank("tensor")]
inputs = torch.full((1, 3), 1.0 + mesh.get_local_rank("data"))  # each row of the mesh has its own part of the data
halves = [torch.empty(1, 2), torch.empty(1, 2)]
dist.all_gather(halves, inputs @ mine, group=mesh.get_group("tensor"))
outputs = torch.cat(halves, dim=1)
assert torch.equal(outputs, inputs @ weights)

# The ranks of a column hold the same weights: their gradients are averaged over the parts of the data.
gradient = inputs.T.expand(3, 2).clone()
dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=mesh.get_group("data"))
print(f"rank {rank} has the outputs {outputs[0].tolist()} and the gradient {gradient[0].tolist()}")

# Any ranks: new_group is called by all, with the same ranks; those outside get no group to use.
odd = dist.new_group([1, 3])
if rank in (1, 3):
    total = torch.tensor([rank])
    dist.all_reduce(total, group=odd)
    print(f"rank {rank} is number {dist.get_rank(odd)} of the odd ones, which add up to {total.item()}")
dist.destroy_process_group()
