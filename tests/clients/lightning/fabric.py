"""Fabric: training, collectives and checkpoints under each of its launchers.

python fabric.py popen|spawn|fork
"""

import sys
import warnings
from pathlib import Path

import torch
from client_report import BACKEND, DEVICE, report
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


def make_data() -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(60, 8, generator=random)
    return TensorDataset(inputs, inputs[:, :3].argmax(-1))


def train(fabric: Fabric) -> None:
    rank = fabric.global_rank
    torch.manual_seed(7 + rank)  # the parameters of rank 0 count
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    data = make_data()
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=6, sampler=SequentialSampler(data)))
    accuracy = MulticlassAccuracy(num_classes=3).to(fabric.device)
    losses = []
    for epoch in range(2):
        for number, (inputs, classes) in enumerate(loader):
            accumulates = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                scores = model(inputs)
                loss = torch.nn.functional.cross_entropy(scores, classes)
                fabric.backward(loss)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            accuracy.update(scores, classes)
            losses.append(loss.detach())
        report(rank, f"accuracy of epoch {epoch}", accuracy.compute())
        accuracy.reset()
    report(rank, "losses", torch.stack(losses))
    report(rank, "parameters", [parameter.detach() for parameter in model.parameters()])
    report(rank, "buffers", list(model.buffers()))
    save_and_load(fabric, model, optimizer)


def save_and_load(fabric: Fabric, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    path = Path("checkpoint.pt").resolve()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 11})
    fabric.barrier()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    rest = fabric.load(path, {"model": model, "optimizer": optimizer})
    same = all(torch.equal(left, right) for left, right in zip(before, model.parameters(), strict=True))
    report(fabric.global_rank, "loaded", [same, rest["step"]])


def use_collectives(fabric: Fabric) -> None:
    rank = fabric.global_rank
    report(rank, "world", [fabric.world_size, fabric.local_rank, fabric.is_global_zero])
    for name, tensor in (("floats", torch.arange(4.0) + rank), ("integers", torch.arange(4) + 3 * rank)):
        report(rank, f"all_reduce sum of {name}", fabric.all_reduce(tensor.clone(), reduce_op="sum"))
        report(rank, f"all_reduce max of {name}", fabric.all_reduce(tensor.clone(), reduce_op="max"))
        report(rank, f"all_gather of {name}", fabric.all_gather(tensor))
    report(rank, "all_reduce mean", fabric.all_reduce(torch.arange(4.0) + rank, reduce_op="mean"))
    # On every backend but one called "gloo" Lightning averages by AVG; integers by Gloo come back as the sum, divided.
    mean = fabric.all_reduce(torch.tensor([4, 10, -6]) + 2 * rank, reduce_op="mean")
    report(rank, "all_reduce mean of integers", mean.to(torch.int64))
    report(rank, "all_gather of a tree", fabric.all_gather({"a": torch.tensor(rank), "b": [torch.ones(2) * rank]}))
    report(rank, "broadcast", fabric.broadcast({"from": rank, "text": "x" * 50}, src=1))
    report(rank, "broadcast of a tensor", fabric.broadcast(torch.full((3,), float(rank)), src=0))
    with fabric.rank_zero_first():
        report(rank, "rank_zero_first", rank)
    sampler = DistributedSamplerWrapper(SequentialSampler(range(9)), num_replicas=2, rank=rank, shuffle=False)
    report(rank, "sampler", list(sampler))
    fabric.barrier()


def play(fabric: Fabric) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    use_collectives(fabric)
    train(fabric)


def main(start: str) -> None:
    strategy = DDPStrategy(process_group_backend=BACKEND, start_method=start)
    fabric = Fabric(accelerator=DEVICE, devices=2, strategy=strategy)
    if start == "popen":
        fabric.launch()
        play(fabric)
    else:
        fabric.launch(play)


if __name__ == "__main__":
    main(sys.argv[1])
