"""Run a program on ranks that each have a stand-in GPU."""

from __future__ import annotations

from typing import Any

from torch_gpus import stand_in_torch

from world import run


def play(program: Any, *args: Any, size: int = 2, gpus: int = 2, backend: str = "nccl", delay: int = 300) -> list[Any]:
    """Return what ``program(gpu_training, *args)`` returns on each rank.

    Each operation of a GPU takes ``delay`` microseconds, so that what is not waited for shows as wrong numbers.
    """
    environment = {"PROCGROUP_STAND_IN_GPUS": str(gpus), "PROCGROUP_STAND_IN_DELAY_US": str(delay)}
    return run(_on_its_gpu, size, args=(program, backend, *args), torch="gpus", environment=environment)


def _on_its_gpu(rank: int, size: int, program: Any, backend: str, *args: Any) -> Any:
    stand_in_torch.start()
    import torch
    from torch_gpus import gpu_training

    import procgroup as dist

    torch.set_num_threads(1)
    torch.cuda.set_device(rank * torch.cuda.device_count() // size)
    dist.init_process_group(backend)
    result = program(gpu_training, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
