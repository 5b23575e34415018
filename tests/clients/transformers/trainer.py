"""Train a small random GPT-2 with transformers' Trainer; evaluate, save, resume, predict. Nothing is downloaded.

Trainer names the backend itself; where a program has made the default group before, it uses that.
"""

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from client_report import BACKEND, DEVICE, report
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

FOLDER = "checkpoints"
STEPS = 8
HALF = STEPS // 2


class Tokens(Dataset[dict[str, Any]]):
    """Random texts of 16 tokens."""

    def __init__(self, number: int, seed: int) -> None:
        self.texts = torch.randint(0, 64, (number, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def main() -> None:
    if BACKEND == "procgroup":
        dist.init_process_group(BACKEND)
    whole = make_trainer()
    whole.train()
    rank = whole.args.process_index
    report(rank, "processes", [whole.args.world_size, whole.args.local_process_index])
    report(rank, "losses", losses(whole))
    resumed = make_trainer()
    resumed.train(resume_from_checkpoint=f"{FOLDER}/checkpoint-{HALF}")
    report(rank, "losses of the resumed run", losses(resumed))
    assert losses(resumed) == losses(whole)
    predicted = resumed.predict(Tokens(19, seed=3))
    assert predicted.predictions.shape == (19, 16, 64)
    report(rank, "predictions", predicted.predictions)
    report(rank, "metrics of the prediction", predicted.metrics["test_loss"])
    dist.destroy_process_group()


def make_trainer() -> Trainer:
    """Return a Trainer for a new model; the 50 and 19 examples make no whole batches."""
    torch.manual_seed(0)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **size))
    arguments = TrainingArguments(
        FOLDER,
        use_cpu=DEVICE == "cpu",
        seed=1,
        per_device_train_batch_size=3,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        max_steps=STEPS,
        save_steps=HALF,
        eval_strategy="steps",
        eval_steps=HALF,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(model, arguments, train_dataset=Tokens(50, seed=1), eval_dataset=Tokens(19, seed=2))


def losses(trainer: Trainer) -> list[list[float]]:
    """Return what was logged: step, and loss of the training or of the evaluation."""
    log = trainer.state.log_history
    return [
        [entry["step"], entry.get("loss", entry.get("eval_loss"))]
        for entry in log
        if {"loss", "eval_loss"} & set(entry)
    ]


if __name__ == "__main__":
    main()
