"""A program of stock PyTorch, as it was written for Gloo: DistributedDataParallel and DistributedSampler of torch.

    python -m procgroup run --nproc-per-node 2 examples/torch_unchanged.py
    python -m procgroup run --nproc-per-node 2 --replace-gloo examples/torch_unchanged.py
    BACKEND=procgroup python -m torch.distributed.run --nproc-per-node 2 examples/torch_unchanged.py

The first command only starts it: Gloo moves the bytes. With the others procgroup does: in Gloo's place, which
PROCGROUP_REPLACE_GLOO=1 in the environment gives it under torchrun too, or because the backend's name says so. The
losses are the same.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train() -> list[float]:
    """Return this rank's last loss of each epoch. The model ends here: under Gloo it must not outlive its group."""
    torch.manual_seed(0)
    inputs = torch.randn(200, 4)
    dataset = TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]))
    sampler: DistributedSampler[int] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, last = [], 0.0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), targets)
            loss.backward()
            optimizer.step()
            last = loss.item()
        losses.append(last)
    return losses


dist.init_process_group(os.environ.get("BACKEND", "gloo"))
losses = " ".join(f"{loss:.3g}" for loss in train())
world = dist.group.WORLD
assert world is not None
moved_by = type(world._get_backend(torch.device("cpu"))).__module__.split(".")[0]
print(f"rank {dist.get_rank()}: {dist.get_backend()}, moved by {moved_by}: losses {losses}", flush=True)
dist.destroy_process_group()
