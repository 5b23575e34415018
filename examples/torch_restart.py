"""torchrun's --max_restarts: a rank fails, all are started again, and go on from the last checkpoint.

python -m torch.distributed.run --standalone --nproc_per_node=2 --max_restarts=1 examples/torch_restart.py

The group is procgroup's own: at every attempt its ranks find each other by way of the store that torchrun keeps.
"""

import os
import tempfile
from pathlib import Path

import torch

import procgroup as dist

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
checkpoint = Path(tempfile.gettempdir(), f"{os.environ['TORCHELASTIC_RUN_ID']}.pt")
partial = checkpoint.with_suffix(".partial")

weights, first_step = torch.zeros(2), 0
if checkpoint.exists():
    first_step, weights = torch.load(checkpoint)
print(f"rank {rank}, attempt {attempt}: begins at step {first_step} with {weights.tolist()}", flush=True)
dist.barrier()  # all have read it

for step in range(first_step, 6):
    if (rank, attempt, step) == (1, 0, 4):
        raise SystemExit("rank 1 fails at step 4 of its first attempt")
    gradient = torch.tensor([1.0, 10.0 * rank])
    dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    weights += gradient
    if rank == 0 and step % 3 == 2:
        torch.save((step + 1, weights), partial)
        partial.replace(checkpoint)  # so that there is never half a checkpoint
print(f"rank {rank}, attempt {attempt}: ends with {weights.tolist()}", flush=True)

dist.barrier()
if rank == 0:
    checkpoint.unlink()
dist.destroy_process_group()
