"""Ignite's Engine on all ranks: auto_model, auto_optim, auto_dataloader, metrics of uneven data.

python training.py            # idist.Parallel starts two processes
(launcher) training.py launched
"""

import sys
from typing import Any

import ignite.distributed as idist
import torch
from client_report import DEVICE, report
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Average, ConfusionMatrix, EpochMetric, Loss, Precision, Recall, RunningAverage
from torch.utils.data import TensorDataset


def data(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :3].argmax(-1))


def main(local_rank: int) -> None:
    torch.set_num_threads(1)
    rank = idist.get_rank()
    torch.manual_seed(5 + rank)
    model = idist.auto_model(torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3)))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = torch.nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, loss, device=idist.device())
    RunningAverage(output_transform=lambda value: value).attach(trainer, "running loss")
    metrics: dict[str, Any] = {
        "accuracy": Accuracy(),
        "loss": Loss(loss),
        "precision": Precision(average=True),
        "recall": Recall(),
        "confusion": ConfusionMatrix(3),
        "mean score": Average(output_transform=lambda output: output[0].mean().item()),
        "of all outputs": EpochMetric(lambda scores, classes: float((scores.argmax(-1) == classes).float().sum())),
    }
    evaluator = create_supervised_evaluator(model, metrics, device=idist.device())
    training = idist.auto_dataloader(data(64, 1), batch_size=16, shuffle=True)
    validation = idist.auto_dataloader(data(31, 2), batch_size=8, shuffle=False)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        training.sampler.set_epoch(engine.state.epoch)  # type: ignore[union-attr]
        evaluator.run(validation)
        report(rank, f"epoch {engine.state.epoch}", dict(evaluator.state.metrics))

    trainer.run(training, max_epochs=2)
    report(rank, "running loss", trainer.state.metrics["running loss"])
    report(rank, "parameters", [parameter.detach() for parameter in model.parameters()])
    report(rank, "wrapped in", type(model).__name__)
    idist.barrier()


if __name__ == "__main__":
    launched = sys.argv[1:] == ["launched"]
    with idist.Parallel(
        backend="nccl" if DEVICE == "cuda" else "gloo", **({} if launched else {"nproc_per_node": 2})
    ) as parallel:
        parallel.run(main)
