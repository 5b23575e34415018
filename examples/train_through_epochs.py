"""Train over epochs with a DataLoader and checkpoints, and go on when a rank dies in the middle of an epoch.

    procgroup run --nproc-per-node 3 --replace --max-restarts 3 examples/train_through_epochs.py --go-on replace
    procgroup run --nproc-per-node 3 --keep-going examples/train_through_epochs.py --go-on shrink

Rank 1 kills itself in the second epoch, as a machine that fails would. How far the training is, is in the state of the
sampler: the epoch, and how many samples all ranks have used of it. It is shared like the optimizer's, so a new process
begins with the batch that the others make next, and not with batch 0. A smaller group divides the samples that remain
of the epoch among its ranks. Checkpoints hold the same states, so a later run, with any number of ranks, continues.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import procgroup as dist
from procgroup.parallel import DistributedDataParallel, DistributedSampler

SAMPLES, BATCH = 480, 8
VICTIM, DIES_IN_EPOCH, DIES_AT_BATCH = 1, 1, 5


def make_data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


class Training:
    """The model, its optimizer, the data, and how far the training is: ``sampler.epoch`` and its position there."""

    def __init__(self, go_on: Any, checkpoint: Path) -> None:
        self.data = make_data()
        self.sampler = DistributedSampler(self.data, seed=1)
        module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        self.checkpoint = checkpoint
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.sampler.load_state_dict(saved["sampler"])
        self.model = DistributedDataParallel(module, on_lost_rank=go_on)
        self.model.share_state(self.optimizer, self)  # a new process takes the others', which are ahead of a checkpoint

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)

    def train_epoch(self, dies: bool) -> float:
        """Train to the end of the sampler's epoch; return the last loss."""
        loss = torch.zeros(())
        while True:
            size = dist.get_world_size()
            for batch, (inputs, targets) in enumerate(DataLoader(self.data, BATCH, sampler=self.sampler)):
                if dies and (self.sampler.epoch, batch) == (DIES_IN_EPOCH, DIES_AT_BATCH):
                    os.kill(os.getpid(), signal.SIGKILL)
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                loss.backward()
                self.optimizer.step()
                self.sampler.advance(len(inputs))  # these samples are used
                if dist.get_world_size() < size and self.model.on_lost_rank == "shrink":
                    break
            else:
                return loss.item()
            # Fewer ranks: divide what remains of the epoch among them.
            smaller = DistributedSampler(self.data, seed=1)
            smaller.load_state_dict(self.sampler.state_dict())
            self.sampler = smaller

    def save(self) -> None:
        """Write the checkpoint on rank 0, whole or not at all."""
        if dist.get_rank() != 0:
            return
        states = {"model": self.model.module, "optimizer": self.optimizer, "sampler": self.sampler}
        unfinished = self.checkpoint.with_suffix(".unfinished")
        torch.save({name: one.state_dict() for name, one in states.items()}, unfinished)
        unfinished.replace(self.checkpoint)


def main() -> None:
    options = argparse.ArgumentParser(description="Train over epochs through the death of a rank.")
    options.add_argument("--go-on", choices=("shrink", "replace"), default="replace")
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--checkpoint", type=Path, default=Path("through_epochs.pt"))
    options.add_argument("--nobody-dies", action="store_true")
    arguments = options.parse_args()

    dist.init_process_group()
    is_new = bool(dist.get_new_ranks())
    is_victim = dist.get_rank() == VICTIM and not is_new and not arguments.nobody_dies
    training = Training(arguments.go_on, arguments.checkpoint)
    began = training.sampler.state_dict()
    while training.sampler.epoch < arguments.epochs:
        loss = training.train_epoch(dies=is_victim)
        if dist.get_rank() == 0:
            print(f"epoch {training.sampler.epoch}: loss {loss:.4f}, {dist.get_world_size()} ranks", flush=True)
        training.sampler.set_epoch(training.sampler.epoch + 1)
        training.save()
    if is_new:
        print(f"this process began in epoch {began['epoch']}, at sample {began['position']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
