"""Train with Ray Train's TorchTrainer on a cluster of this process's own, which ends with it."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

import ray
import ray.train
import torch
import torch.distributed as dist
from client_report import BACKEND, DEVICE, report
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train(settings: dict[str, Any]) -> None:
    """Train on one worker; report its losses, and what all workers' losses add up to."""
    rank = ray.train.get_context().get_world_rank()
    generator = torch.Generator().manual_seed(1)
    inputs, wanted = torch.randn(37, 4, generator=generator), torch.randn(37, 1, generator=generator)
    loader = prepare_data_loader(DataLoader(TensorDataset(inputs, wanted), batch_size=5, shuffle=True))
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(settings["epochs"]):
        loader.sampler.set_epoch(epoch)
        for batch, target in loader:
            loss = torch.nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                torch.save(model.state_dict(), f"{folder}/model.pt")
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"loss": float(total)}, checkpoint=checkpoint)
    names: list[Any] = [None, None]
    dist.all_gather_object(names, f"worker {rank}")
    report(rank, "losses", losses)
    report(rank, "weights", [parameter.tolist() for parameter in model.parameters()])
    report(rank, "world", [names, dist.get_world_size(), dist.get_backend() == BACKEND])


def run(function: Callable[[dict[str, Any]], None], settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Run a function on two workers of a cluster that ends with this call, and return the last checkpoint's weights."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        gpus = 2 if DEVICE == "cuda" else 0
        ray.init(num_cpus=2, num_gpus=gpus, include_dashboard=False, _temp_dir=folder, object_store_memory=80 << 20)
        try:
            trainer = TorchTrainer(
                function,
                train_loop_config=settings,
                scaling_config=ScalingConfig(num_workers=2, use_gpu=gpus > 0),
                torch_config=TorchConfig(backend=BACKEND),
                run_config=RunConfig(name="training", storage_path=folder),
            )
            result = trainer.fit()
            assert result.checkpoint is not None
            with result.checkpoint.as_directory() as saved:
                return torch.load(f"{saved}/model.pt", weights_only=True, map_location="cpu")
        finally:
            ray.shutdown()


if __name__ == "__main__":
    weights = run(train, {"epochs": 3})
    report(-1, "checkpoint", {name.removeprefix("module."): value for name, value in weights.items()})
