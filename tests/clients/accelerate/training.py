"""Train with accelerate: communication hooks, accumulated gradients, uneven batches, a saved state, gathered values.

accelerate names the backend itself; where a program has made the default group before, it uses that.
"""

import os
import tempfile
from typing import Any

from client_report import BACKEND, DEVICE, report

if DEVICE == "cpu":
    os.environ["ACCELERATE_USE_CPU"] = "true"

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    broadcast,
    broadcast_object_list,
    gather_object,
    pad_across_processes,
    reduce,
)
from torch.utils.data import DataLoader, TensorDataset

HOOKS = ["no", "fp16", "power_sgd", "batched_power_sgd"]
"""All that PyTorch allows on CPUs: bf16 asks for CUDA."""


def main() -> None:
    if BACKEND == "procgroup":
        torch.distributed.init_process_group(BACKEND)
    for hook in HOOKS:
        train(hook)
    operations()
    torch.distributed.destroy_process_group()


def train(hook: str) -> None:
    """Train for two epochs, the second of them a second time from the state saved before it."""
    chosen = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(hook))
    accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[chosen])
    torch.manual_seed(7)
    inputs = torch.randn(53, 8)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=5, shuffle=True))
    losses = epoch(accelerator, model, optimizer, loader)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        broadcast_object_list(folders)
        accelerator.save_state(folders[0])
        second = epoch(accelerator, model, optimizer, loader)
        accelerator.load_state(folders[0])
        accelerator.wait_for_everyone()
    again = epoch(accelerator, model, optimizer, loader)
    rank = accelerator.process_index
    report(rank, f"losses, {hook}", losses + second)
    report(rank, f"losses after loading the state, {hook}", again)
    report(rank, f"gathered for metrics, {hook}", evaluate(accelerator, model, data))


def epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """Return the losses of all batches, and among them the norm of the gradients before each step."""
    losses = []
    for inputs, wanted in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def evaluate(accelerator: Accelerator, model: Any, data: Any) -> list[Any]:
    """Return each example's output once, though the last batch is filled up on some ranks."""
    outputs = []
    with torch.no_grad():
        for inputs, _ in accelerator.prepare(DataLoader(data, batch_size=6)):
            outputs += accelerator.gather_for_metrics(model(inputs)).flatten().tolist()
    assert len(outputs) == len(data)
    return outputs


def operations() -> None:
    """Report what accelerate's own calls give: on tensors of different sizes, nested ones, and objects."""
    accelerator = Accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    torch.set_default_device(accelerator.device)
    nested = {"a": torch.full((2, 3), float(rank)), "b": [torch.arange(3) * rank]}
    report(rank, "gather", accelerator.gather(nested))
    report(rank, "reduce to a sum", reduce(nested, "sum"))
    report(rank, "reduce to a mean", reduce({"a": nested["a"]}, "mean"))
    report(rank, "broadcast", broadcast({"a": torch.full((4,), rank)}, from_process=size - 1))
    padded = pad_across_processes(torch.ones(rank + 1, 2), pad_index=-1)
    report(rank, "tensors of different sizes", accelerator.gather(padded))
    report(rank, "gather_object", gather_object([{"rank": rank, "text": "x" * rank}]))
    with accelerator.split_between_processes(list(range(7))) as mine:
        report(rank, "split_between_processes", mine)
    if rank == size - 1:
        accelerator.set_trigger()
    report(rank, "trigger", accelerator.check_trigger())
    with accelerator.main_process_first():
        report(rank, "processes", [size, accelerator.local_process_index, accelerator.is_main_process])


if __name__ == "__main__":
    main()
