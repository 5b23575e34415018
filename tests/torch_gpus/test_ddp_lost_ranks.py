"""DistributedDataParallel on GPUs goes on when a rank is killed in a step: without it, and with a new process."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time

import pytest
from parallel.test_distributed_data_parallel_lost_ranks import PROGRAM, check_survivors, digest, inputs_of, make_model
from torch_gpus import stand_in_torch

import procgroup as dist
from world import run_command, start

pytestmark = pytest.mark.torch

SIZE, STEPS = 3, 12
SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed >= 20 else ()) for seed in range(60)]


def train(rank: int, size: int, victim: int, seed: int) -> tuple[int, list[int], str]:
    """Train; ``victim`` dies in the backward of a step. Return this rank, the sizes by step, and the model's digest."""
    stand_in_torch.start()
    import torch

    from procgroup.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(7)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=20)
    model = DistributedDataParallel(make_model().cuda(), device_ids=[rank], bucket_cap_mb=0.5, on_lost_rank="shrink")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    choice = random.Random(seed)
    last, delay = choice.randrange(STEPS - 2), choice.uniform(0.0, 0.05)
    sizes = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (model(inputs_of(step, rank)) ** 2).mean()
        if rank == victim and step == last:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        loss.backward()
        sizes.append(dist.get_world_size())
        optimizer.step()
    if rank == victim:
        time.sleep(60)  # it dies after its last step
    model.retry(dist.barrier)
    result = int(model.process_group.rank()), sizes, digest(model)
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("seed", SEEDS)
def test_the_others_train_on_whenever_a_rank_dies_in_a_step(seed: int) -> None:
    environment = {"PROCGROUP_STAND_IN_GPUS": str(SIZE), "PROCGROUP_STAND_IN_DELAY_US": str(seed % 3 * 200)}
    with start(train, SIZE, args=(seed % SIZE, seed), environment=environment, torch="gpus") as world:
        check_survivors(world.wait(60), {seed % SIZE: 0})


def loss_of(deaths: str) -> float:
    """Train under the launcher, which starts new processes; return the last loss, which all ranks have printed."""
    launcher = (
        sys.executable,
        "-m",
        "procgroup",
        "run",
        "--nproc-per-node",
        str(SIZE),
        "--replace",
        "--max-restarts",
        "6",
    )
    environment = stand_in_torch.environment(gpus=SIZE)
    done = run_command([*launcher, str(PROGRAM), deaths], timeout=250, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition(" digest ")[2] for line in done.stdout.splitlines() if " digest " in line]
    assert len(lines) == SIZE
    assert len(set(lines)) == 1, lines
    found = re.fullmatch(r"\w+ \S+ loss (\S+) steps 60 of 3 ranks", lines[0])
    assert found is not None, lines[0]
    return float(found[1])


def test_new_processes_take_the_place_of_lost_ones_on_their_gpus() -> None:
    """All end with the same parameters, and train as well as in a run in which no rank is lost."""
    assert loss_of("1:20") < 2 * loss_of("0:99")
