"""Processes of torch.multiprocessing.spawn, which meet in a file.

python examples/torch_spawn.py
"""

import tempfile
from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

import procgroup as dist


def run(rank: int, size: int, meeting_place: str) -> None:
    """Be one rank: spawn calls this with the number of the process first."""
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=size)
    tensor = torch.full((2, 2), rank + 1.0)
    dist.all_reduce(tensor)
    print(f"rank {rank} of {size} has {tensor.tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, args=(2, str(Path(folder, "meet"))), nprocs=2)
