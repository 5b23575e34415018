"""The tutorials' programs for GPUs, as they are written, by each way to start them.

They are played twice: with torch.distributed, whose "nccl" is procgroup's, and with procgroup by one changed import.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch_gpus import stand_in_torch

from world import free_port, run_command

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

TRAIN = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(local_rank):
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    model = DDP(model, device_ids=[local_rank], output_device=local_rank)
    data = TensorDataset(torch.arange(640.0).reshape(64, 10).sin(), torch.arange(64.0).unsqueeze(1).cos())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), os.environ["CHECKPOINT"])
    dist.barrier()
    model.module.load_state_dict(torch.load(os.environ["CHECKPOINT"], map_location=device))
    weight = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {total.device}: {total.item():.4f} {weight:.4f}")
"""

UNDER_TORCHRUN = f"""{TRAIN}
if __name__ == "__main__":
    dist.init_process_group("nccl")
    train(int(os.environ["LOCAL_RANK"]))
    dist.destroy_process_group()
"""

BOUND = f"""{TRAIN}
if __name__ == "__main__":
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(backend="nccl", device_id=torch.device(f"cuda:{{local_rank}}"))
    train(local_rank)
    dist.destroy_process_group()
"""

UNDER_LAUNCH = f"""{TRAIN}
import argparse

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", "--local_rank", type=int)
    local_rank = parser.parse_args().local_rank
    dist.init_process_group(backend="nccl", init_method="env://")
    train(local_rank)
    dist.destroy_process_group()
"""

SPAWNED = f"""{TRAIN}
import torch.multiprocessing as mp


def main(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ["A_PORT"]
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    train(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    mp.spawn(main, args=(world_size,), nprocs=world_size, join=True)
"""

TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port={port}"]
WAYS: dict[str, tuple[str, list[str]]] = {
    "torchrun": (UNDER_TORCHRUN, TORCHRUN),
    "torchrun, bound to a GPU": (BOUND, TORCHRUN),
    "launch": (UNDER_LAUNCH, ["-m", "torch.distributed.launch", "--nproc_per_node=2", "--master_port={port}"]),
    "spawn": (SPAWNED, []),
    "procgroup run": (UNDER_TORCHRUN, ["-m", "procgroup", "run", "--nproc-per-node=2", "--replace-nccl"]),
    "procgroup run, a GPU of its own for each rank": (
        UNDER_TORCHRUN,
        ["-m", "procgroup", "run", "--nproc-per-node=2", "--replace-nccl", "--virtual-local-rank"],
    ),
}

SAMPLE = {
    ("torch", "torchrun"),
    ("torch", "launch"),
    ("procgroup", "torchrun, bound to a GPU"),
    ("procgroup", "spawn"),
    ("procgroup", "procgroup run, a GPU of its own for each rank"),
}
"""Each launcher, and each form of the program, once: the other pairs are in `make test-all`."""


def run_program(folder: Path, source: str, launcher: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(source)
    port = str(free_port())
    environment = {**stand_in_torch.environment(gpus=2), "A_PORT": port, "CHECKPOINT": str(folder / "model.pt"), **more}
    command = [sys.executable, *(part.format(port=port) for part in launcher), str(program)]
    return run_command(command, environment=environment, timeout=250)


def results_of(done: Any) -> dict[str, tuple[float, float]]:
    """Return the losses and the sums of the weights that the ranks have printed, by rank and device."""
    assert done.returncode == 0, done.stdout + done.stderr
    # Ranks share one pipe, and a rank may write the end of its line after the line of the other.
    number = r"(-?\d+\.\d{4})"
    found = re.findall(rf"rank (\d) of 2 on (\S+): {number} {number}", done.stdout)
    return {f"{rank} on {device}": (float(loss), float(weight)) for rank, device, loss, weight in found}


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    source = UNDER_TORCHRUN.replace('"nccl"', '"gloo"').replace("torch.cuda.set_device(local_rank)", "")
    source = source.replace('torch.device("cuda", local_rank)', 'torch.device("cpu")')
    source = source.replace(", device_ids=[local_rank], output_device=local_rank", "")
    done = run_program(tmp_path_factory.mktemp("on_cpus"), source, TORCHRUN)
    return results_of(done)["0 on cpu"]


def with_procgroup(source: str) -> str:
    """Return the program with the imports changed."""
    source = source.replace("import torch.distributed as dist", "import procgroup as dist")
    source = source.replace("from torch.nn.parallel import", "from procgroup.parallel import")
    return source.replace("from torch.utils.data.distributed import", "from procgroup.parallel import")


@pytest.mark.parametrize(
    ("library", "way"),
    [
        pytest.param(library, way, id=f"{library}-{way}", marks=() if (library, way) in SAMPLE else pytest.mark.slow)
        for library in ("torch", "procgroup")
        for way in WAYS
    ],
)
def test_the_tutorials_training_program_gives_on_gpus_what_it_gives_on_cpus(
    tmp_path: Path, library: str, way: str, on_cpus: tuple[float, float]
) -> None:
    source, launcher = WAYS[way]
    replaced = {"CUDA_VISIBLE_DEVICES": "1,0"} if "of its own" in way else {}
    if library == "procgroup":
        source = with_procgroup(source)
    elif not way.startswith("procgroup run"):
        replaced["PROCGROUP_REPLACE_NCCL"] = "1"
    results = results_of(run_program(tmp_path, source, launcher, **replaced))
    second = "cuda:0" if "of its own" in way else "cuda:1"
    assert sorted(results) == ["0 on cuda:0", f"1 on {second}"]
    for result in results.values():
        assert result == pytest.approx(on_cpus, abs=2e-4)


TWO_GROUPS = """
import os
import torch
import procgroup as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
base = dist.TCPStore("localhost", int(os.environ["A_PORT"]), size, rank == 0)
for prefix in ("group1_", "group2_"):
    options = {"timeout": 60, "init_method_timeout": 30}
    dist.init_process_group(
        "nccl", store=dist.PrefixStore(prefix, base), rank=rank, world_size=size, pg_options=options,
        device_id=torch.device("cuda", rank) if prefix == "group2_" else None,
    )
    values = torch.full((3,), rank + 1.0, device="cuda")
    dist.all_reduce(values)
    print(prefix, rank, values.tolist())
    dist.destroy_process_group()
"""


def test_two_groups_over_one_store_eager_and_lazy_with_options_as_a_dict(tmp_path: Path) -> None:
    done = run_program(tmp_path, TWO_GROUPS, ["-m", "procgroup", "run", "--nproc-per-node=2"])
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(line.removeprefix(f"[rank {line[6]}] ") for line in done.stdout.splitlines())
    assert found == [f"{prefix} {rank} [3.0, 3.0, 3.0]" for prefix in ("group1_", "group2_") for rank in range(2)]
