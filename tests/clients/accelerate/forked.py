"""Start ranks by accelerate's own launchers, which fork them, twice, in a process that uses torch already."""

import os

os.environ["ACCELERATE_USE_CPU"] = "true"

import torch
from accelerate import Accelerator, debug_launcher, notebook_launcher
from client_report import report


def train(name: str) -> None:
    accelerator = Accelerator()
    torch.manual_seed(3)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(5):
        loss = model(torch.full((3, 6), float(step - accelerator.process_index))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).tolist())
    report(accelerator.process_index, name, losses)
    report(accelerator.process_index, f"{name}: weights", model.module.weight)
    accelerator.end_training()


if __name__ == "__main__":
    for again in (1, 2):
        debug_launcher(train, (f"debug_launcher, {again}",), num_processes=2)
        notebook_launcher(train, (f"notebook_launcher, {again}",), num_processes=2)
