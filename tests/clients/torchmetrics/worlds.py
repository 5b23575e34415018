"""Many small worlds, as a library's tests make them: each metric in new processes, which join, compute and end."""

import os
import socket
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from client_report import BACKEND, report
from torchmetrics import classification

METRICS = [
    classification.MulticlassAccuracy,
    classification.MulticlassRecall,
    classification.MulticlassAUROC,
    classification.MulticlassConfusionMatrix,
]
WORLDS = 12
SIZE = 2


def play(rank: int, world: int, port: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(BACKEND, rank=rank, world_size=SIZE)
    metric = METRICS[world % len(METRICS)](num_classes=3)
    random = torch.Generator().manual_seed(rank)
    metric.update(torch.randn(9 + rank, 3, generator=random).softmax(-1), torch.arange(9 + rank) % 3)
    report(rank, f"world {world}", metric.compute())
    dist.destroy_process_group()


def main() -> None:
    for world in range(WORLDS):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.start_processes(play, (world, port), nprocs=SIZE, start_method="fork")


if __name__ == "__main__":
    main()
