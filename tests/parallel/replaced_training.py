"""Train on ranks, some of which kill themselves: ``replaced_training.py 2:20,0:40 [--buffers] [--seed 5]``.

Each pair is a rank and the step in which it dies. A process dies only where it has made the step before, so a new
process in its place lives. With a seed it dies from another thread, in whatever it does a random time later. Where
torch has GPUs, the model is on that of the rank.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
from parallel.test_distributed_data_parallel_lost_ranks import digest, inputs_of, make_model

import procgroup as dist
from procgroup.parallel import DistributedDataParallel

STEPS = 60


@dataclass
class Progress:
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main() -> None:
    deaths = [tuple(map(int, death.split(":"))) for death in sys.argv[1].split(",")]
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # A rank that goes on waits so long for the process that takes a lost one's place, which has to import torch.
    dist.init_process_group("nccl" if device.type == "cuda" else None, timeout=100)
    is_new = bool(dist.get_new_ranks())
    began_as = dist.get_rank()
    model = DistributedDataParallel(make_model("--buffers" in sys.argv).to(device), on_lost_rank="replace")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    progress = Progress()
    model.share_state(optimizer, progress)
    began_at = progress.step
    loss = torch.zeros(())
    while progress.step < STEPS:
        if (began_as, progress.step) in deaths and progress.step > began_at:
            if "--seed" not in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
            delay = random.Random(f"{sys.argv} {began_as}").uniform(0.0, 0.03)
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        optimizer.zero_grad()
        loss = (model(inputs_of(progress.step, dist.get_rank()).to(device)) ** 2).mean()
        loss.backward()
        optimizer.step()
        progress.step += 1
    moments = optimizer.state_dict()["state"][0]["exp_avg"].double().sum().item()
    kind = f"new at step {began_at}" if is_new else "old"
    losses = torch.zeros((), device=device) + loss.detach()
    dist.all_reduce(losses)
    trained = f"{digest(model)} {moments} loss {losses.item():.6f}"
    print(f"{kind} digest {trained} steps {progress.step} of {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
