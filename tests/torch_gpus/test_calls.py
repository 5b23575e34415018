"""What a PyTorch program may call, with tensors on GPUs: by NCCL, and where that is missing through host memory."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from functools import partial

import pytest
from collectives.playing import nothing_went_wrong, play_programs
from torch_gpus import stand_in_torch

from world import run

pytestmark = pytest.mark.torch

NAMES: list[str] = []
if importlib.util.find_spec("torch") is not None:
    from torch_plugin import calls

    NAMES = list(calls.CALLS)

# Without stream memory operations the ranks agree on a call before it is queued.
WAYS = {"nccl": {}, "nccl without gates": {"PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS": "1"}, "staged": {}}


def make_the_calls(rank: int, size: int, way: str) -> dict[str, str]:
    stand_in_torch.start()
    import torch
    import torch.distributed as dist

    from procgroup import torch_plugin
    from procgroup.backends import nccl_library

    torch_plugin.register()
    torch.cuda.set_device(rank)
    if way == "staged":
        nccl_library.is_installed = lambda: False
    dist.init_process_group("procgroup", timeout=timedelta(seconds=30))
    became = play_programs(calls.CALLS, rank, size, partial(torch.device, "cuda", rank))
    dist.destroy_process_group()
    return became


@pytest.fixture(scope="module", params=list(WAYS))
def of_ranks(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    environment = {"PROCGROUP_STAND_IN_GPUS": "3", "PROCGROUP_STAND_IN_DELAY_US": "100", **WAYS[request.param]}
    return run(make_the_calls, 3, args=(request.param,), timeout=250, torch="gpus", environment=environment)


@pytest.mark.parametrize("name", NAMES)
def test_a_pytorch_program_on_gpus(of_ranks: list[dict[str, str]], name: str) -> None:
    nothing_went_wrong(name, of_ranks)
