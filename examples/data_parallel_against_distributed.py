"""torch.nn.DataParallel beside DistributedDataParallel: the same model, data and results; another way to run them.

    python -m procgroup run --nproc-per-node 2 examples/data_parallel_against_distributed.py

DataParallel is one process: it deals each batch out to threads, one per GPU, and copies the model to them in every
step. Without GPUs it runs the module itself, on the whole batch. DistributedDataParallel is one process per rank, each
with a model that stays, its own part of the batch, and gradients that are averaged while backward computes.
"""

import os

import torch
from torch import nn

import procgroup as dist
from procgroup.parallel import DistributedDataParallel

STEPS, BATCH = 20, 64


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 5))


def train(model: nn.Module, rank: int, size: int, device: str = "cpu") -> list[torch.Tensor]:
    """Train on the part of each batch that belongs to this rank; return all parameters."""
    random = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.to(device).parameters(), lr=0.05)
    for _ in range(STEPS):
        inputs, targets = torch.randn(BATCH, 10, generator=random), torch.randn(BATCH, 5, generator=random)
        optimizer.zero_grad()
        outputs = model(inputs[rank::size].to(device))
        nn.functional.mse_loss(outputs, targets[rank::size].to(device)).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
distributed = train(DistributedDataParallel(make_network()), rank, size)
print(f"rank {rank}: DistributedDataParallel in process {os.getpid()}, {BATCH // size} rows per step", flush=True)
dist.barrier()
if rank == 0:
    gpus = torch.cuda.device_count()
    alone = train(nn.DataParallel(make_network()), 0, 1, "cuda" if gpus else "cpu")
    print(f"rank {rank}: DataParallel in this process alone, {gpus} GPUs, {BATCH} rows per step")
    difference = max((a - b).abs().max().item() for a, b in zip(alone, distributed, strict=True))
    assert difference < 1e-5, f"expected the same parameters, got a difference of {difference}"
    print(f"the same parameters after {STEPS} steps: largest difference {difference:.0e}")
    print("what differs: processes in place of threads, other hosts too, no copy of the model per step,")
    print("a batch size that is counted per rank, and rank 0 alone that prints and saves")
dist.destroy_process_group()
