"""Train a convolutional network of PyTorch on handwritten digits, on several processes together.

    python -m procgroup run --nproc-per-node 2 examples/train_cnn.py

Each rank trains on its own part of the images, another in each epoch; DistributedDataParallel averages the gradients
while backward still computes. Rank 0 prints the accuracy of all ranks after each epoch, about 0.97 at the end. It
needs torch and scikit-learn, which brings the images: 1,797 of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import procgroup as dist
from procgroup.parallel import DistributedDataParallel, DistributedSampler

BATCH = 32  # images per rank and step


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return four fifths of the images to train on and one fifth to test on."""
    data = load_digits()
    order = np.random.default_rng(1).permutation(len(data.target))
    images = torch.tensor(data.images[order] / 16, dtype=torch.float32).unsqueeze(1)
    digits = torch.tensor(data.target[order])
    cut = len(order) // 5
    return TensorDataset(images[cut:], digits[cut:]), TensorDataset(images[:cut], digits[:cut])


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    """Take one step per batch, and return the mean loss of all ranks."""
    model.train()
    losses = []
    for images, digits in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


@torch.no_grad()
def accuracy(network: nn.Module, dataset: TensorDataset) -> float:
    """Have each rank look at its part of the images, every image once, and return the part that all got right."""
    network.eval()
    images, digits = dataset[list(DistributedSampler(dataset, shuffle=False, mode="exact"))]
    right_and_seen = torch.tensor([(network(images).argmax(dim=1) == digits).sum(), len(digits)])
    dist.all_reduce(right_and_seen)
    right, seen = right_and_seen.tolist()
    return right / seen


def main() -> None:
    options = argparse.ArgumentParser(description="Train a convolutional network on several processes.")
    options.add_argument("--epochs", type=int, default=8)
    arguments = options.parse_args()
    torch.set_num_threads(1)  # one process per core is what makes it faster

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    training, test = load_images()
    torch.manual_seed(rank)  # ranks may begin differently: DistributedDataParallel gives all what rank 0 has
    network = make_network()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=BATCH, sampler=sampler)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        loss, right = train_epoch(model, loader, optimizer), accuracy(network, test)
        if rank == 0:
            print(f"epoch {epoch + 1} on {size} ranks: loss {loss:.4f}, test accuracy {right:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
