"""DistributedDataParallel on stand-in GPUs gives what one process on a CPU gives for the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
from torch_gpus import stand_in_torch

from world import run

pytestmark = pytest.mark.torch
SLOW = {"PROCGROUP_STAND_IN_GPUS": "2", "PROCGROUP_STAND_IN_DELAY_US": "300"}


def play(program: Any, *args: Any, size: int = 2, gpus: int = 2, delay: int = 300) -> list[Any]:
    environment = {"PROCGROUP_STAND_IN_GPUS": str(gpus), "PROCGROUP_STAND_IN_DELAY_US": str(delay)}
    return run(program, size, args=args, torch="gpus", environment=environment)


def train(rank: int, size: int, backend: str, options: dict[str, Any]) -> None:
    stand_in_torch.start()
    from torch_gpus import gpu_training

    gpu_training.join(rank, backend)
    gpu_training.train(*gpu_training.wrap(gpu_training.models.perceptron, **options))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_gradients_are_those_of_the_whole_batch(backend: str) -> None:
    play(train, backend, {})


OPTIONS: list[dict[str, Any]] = [
    {"bucket_cap_mb": 0.0001},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"forward_sync_buffers": False, "init_sync": False, "bucket_cap_mb_list": [0.0001, 0.0002]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_torch_give_these_gradients(options: dict[str, Any]) -> None:
    play(train, "nccl", options)
