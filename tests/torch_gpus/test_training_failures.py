"""Training on GPUs in which a rank stops, fails or dies in a backward: the others say so in time."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
from torch_gpus import stand_in_torch
from torch_gpus.plug_in_world import SLOW_GPUS, begin, seen

from world import start

pytestmark = pytest.mark.torch

SIZE, CULPRIT = 4, 1
GPUS = {**SLOW_GPUS, "PROCGROUP_STAND_IN_GPUS": str(SIZE)}


def join_torch(rank: int) -> tuple[Any, Any]:
    begin(rank)
    import torch.distributed as distributed
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel, distributed.group.WORLD.set_timeout


def join_procgroup(rank: int) -> tuple[Any, Any]:
    stand_in_torch.start()
    import torch

    import procgroup as dist
    from procgroup.parallel import DistributedDataParallel

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=30)
    return DistributedDataParallel, dist.group.WORLD.set_timeout


LIBRARIES = {"torch": join_torch, "procgroup": join_procgroup}


def stop(gradient: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(gradient: Any) -> None:
    raise ValueError("a bug of the program")


def die(gradient: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


HAPPENS = {"stop": stop, "fail": fail, "die": die}


def train(rank: int, size: int, library: str, how: str) -> Any:
    """Take steps until one fails; return what it raised. The gradients fill several buckets."""
    wrap, set_timeout = LIBRARIES[library](rank)
    import torch

    torch.set_num_threads(1)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = wrap(torch.nn.Sequential(*layers).cuda(), device_ids=[rank], bucket_cap_mb=0.01)

    def step() -> None:
        model(torch.ones(2, 64)).sum().backward()

    for _ in range(2):
        step()
    if how == "stop":
        set_timeout(timedelta(seconds=2))
    if rank == CULPRIT:
        model.module[1].weight.register_hook(HAPPENS[how])
        step()
    return next(found for found in (seen(step) for _ in range(3)) if found[0] != "nothing")


@pytest.mark.parametrize("how", HAPPENS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_others_name_the_rank_that_is_the_cause(library: str, how: str) -> None:
    others = [rank for rank in range(SIZE) if rank != CULPRIT]
    with start(train, SIZE, args=(library, how), environment=GPUS, torch="gpus") as world:
        world.wait_for_end(others, 60)
        outcomes = world.outcomes()
    for rank in others:
        assert outcomes[rank].error is None, outcomes[rank].traceback
    kinds, texts, seconds = zip(*(outcomes[rank].value for rank in others), strict=True)
    assert max(seconds) < 15, "half of the timeout of the other ways"
    if how == "stop":  # one has waited for its time, and its failure ends the others
        assert set(kinds) <= {"CollectiveTimeout", "PeerFailed", "GroupBroken"} and "CollectiveTimeout" in kinds, texts
        assert any(f"rank {CULPRIT} is stopped" in text for text in texts), texts
    else:
        assert set(kinds) <= {"PeerLost", "GroupBroken"}, texts  # the latter where a future had the former
        assert all(f"lost rank {CULPRIT}" in text for text in texts), texts
