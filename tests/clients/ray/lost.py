"""Train with Ray Train until worker 1 fails: lost.py raise|kill."""

import sys
from typing import Any

import ray.train
import torch
from failing import fail, reporting_errors
from ray.train.torch import prepare_model
from trainer import run


def train(settings: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(torch.nn.Linear(4, 1))
    with reporting_errors(rank):
        for step in range(1000):
            if step == 3:
                fail(rank, settings["how"])
            model(torch.ones(3, 4)).square().mean().backward()


if __name__ == "__main__":
    run(train, {"how": sys.argv[1]})
