"""Lightning's Trainer: fit, validate, test and predict under each of its launchers.

python trainer.py popen|spawn|fork
"""

import logging
import sys
import warnings
from typing import Any

import torch
from client_report import BACKEND, DEVICE, report
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Classifier(LightningModule):
    """A small network that logs what Lightning reduces between ranks: floats, integers and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        self.accuracy = MulticlassAccuracy(num_classes=3)
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        inputs, classes = batch
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), classes)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train_largest", loss, on_epoch=True, on_step=False, sync_dist=True, reduce_fx="max")
        self.log("train_count", float(len(classes)), on_epoch=True, on_step=False, sync_dist=True, reduce_fx="sum")
        self.seen.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        inputs, classes = batch
        self.accuracy(self.layers(inputs), classes)
        self.log("accuracy", self.accuracy, on_epoch=True)
        correct = (self.layers(inputs).argmax(-1) == classes).sum()
        self.log("correct", correct, on_epoch=True, sync_dist=True)  # the mean over ranks, of an integer

    def test_step(self, batch: Any, number: int) -> None:
        self.validation_step(batch, number)

    def predict_step(self, batch: Any, number: int) -> torch.Tensor:
        predicted: torch.Tensor = self.layers(batch[0]).argmax(-1)
        return predicted

    def on_fit_end(self) -> None:
        rank = self.global_rank
        report(rank, "losses", torch.stack(self.seen))
        report(rank, "parameters", [parameter.detach() for parameter in self.parameters()])
        report(rank, "fit", dict(self.trainer.callback_metrics))
        report(rank, "gathered", self.all_gather(torch.full((2,), float(rank))))
        mean = self.trainer.strategy.reduce(torch.tensor([7 - 14 * rank, rank]), reduce_op="mean")
        report(rank, "mean of integers", mean.to(torch.int64))
        report(
            rank,
            "any and all",
            [self.trainer.strategy.reduce_boolean_decision(rank == 0, all=a) for a in (True, False)],
        )

    def on_test_end(self) -> None:
        report(self.global_rank, "test", dict(self.trainer.callback_metrics))

    def on_predict_end(self) -> None:
        report(self.global_rank, "predicted batches", len(self.trainer.predict_loop.predictions))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def loader(count: int, seed: int) -> DataLoader[Any]:
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(-1)), batch_size=8)


def main(start: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seed_everything(3)
    trainer = Trainer(
        accelerator=DEVICE,
        devices=2,
        strategy=DDPStrategy(process_group_backend=BACKEND, start_method=start),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath="checkpoints", monitor="accuracy", mode="max", save_top_k=1)],
    )
    model = Classifier()
    trainer.fit(model, loader(96, 1), loader(37, 2))
    trainer.test(model, loader(29, 3), verbose=False)
    trainer.predict(model, loader(32, 4), return_predictions=start == "popen")


if __name__ == "__main__":
    main(sys.argv[1])
