"""Train a network of PyTorch with one GPU for each process, with a checkpoint, as PyTorch's tutorials do.

    procgroup run --nproc-per-node gpu examples/train_gpu.py
    python -m procgroup run --nproc-per-node 2 examples/train_gpu.py --cpu

The ranks meet over NCCL, and DistributedDataParallel averages the gradients on the GPUs. With --cpu, and where torch
finds no GPU, the same program runs on CPUs. Rank 0 saves a checkpoint half-way; then all ranks load it, each to its own
GPU, and train on. All print the same loss at the end.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import procgroup as dist
from procgroup.parallel import DistributedDataParallel, DistributedSampler

EPOCHS = 6
BATCH = 32  # rows per rank and step


def make_data() -> TensorDataset:
    """Return points of the plane, and whether they are within a ring."""
    points = torch.rand(2048, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    radius = points.norm(dim=1)
    return TensorDataset(points, ((radius > 0.4) & (radius < 0.8)).float().unsqueeze(1))


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Take one step per batch, and return the mean loss of all ranks."""
    total = torch.zeros((), device=device)
    for points, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(points.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Save the state on rank 0; all ranks have the same. No rank goes on before the file is there."""
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, path)
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Load the state to this rank's device, not to the one that it was saved from; return its epoch."""
    state = torch.load(path, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"])


def shared_folder() -> Path:
    """Return a folder that rank 0 has made. Several hosts need one of a file system that all of them have."""
    found: list[Any] = [tempfile.mkdtemp(prefix="train_gpu.") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(found[0])


def main() -> None:
    options = argparse.ArgumentParser(description="Train a network with one GPU for each process.")
    options.add_argument("--cpu", action="store_true", help="use CPUs, also where there are GPUs")
    on_gpu = not options.parse_args().cpu and torch.cuda.is_available()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(dist.get_rank())  # DistributedDataParallel gives all ranks the parameters of rank 0
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DistributedDataParallel(network.to(device), device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = make_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    checkpoint = shared_folder() / "half-way.pt"
    epoch, loss = 0, 0.0
    while epoch < EPOCHS:
        sampler.set_epoch(epoch)  # another order in each epoch, the same split on all ranks
        loss = train_epoch(model, loader, optimizer, device)
        epoch += 1
        if epoch == EPOCHS // 2:
            save(checkpoint, model, optimizer, epoch)
            epoch = load(checkpoint, model, optimizer, device)
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {size} on {device}: loss {loss:.4f} after {epoch} epochs", flush=True)

    dist.barrier()
    if rank == 0:
        checkpoint.unlink()
        checkpoint.parent.rmdir()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
