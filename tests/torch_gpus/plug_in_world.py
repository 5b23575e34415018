"""The beginning of a rank that uses torch.distributed, by the plug-in, on stand-in GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch_gpus import stand_in_torch

GPUS = {"PROCGROUP_STAND_IN_GPUS": "3"}
SLOW_GPUS = {**GPUS, "PROCGROUP_STAND_IN_DELAY_US": "300"}
"""GPUs whose streams begin each operation late, so that what does not wait shows."""


def begin(rank: int, backend: str = "procgroup", seconds: float = 30.0, **options: Any) -> Any:
    """Initialise torch.distributed on the GPU with the rank's number, and return its module."""
    stand_in_torch.start()
    import torch
    import torch.distributed as distributed

    from procgroup import torch_plugin

    torch_plugin.register()
    torch.cuda.set_device(rank)
    distributed.init_process_group(backend, timeout=timedelta(seconds=seconds), **options)
    return distributed


def seen(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Make a call that must fail; return the kind and text of what it raised, and how long that took."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", 0.0
