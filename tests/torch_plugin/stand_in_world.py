"""A world with the stand-in for a device, whose tensors go whole or in chunks."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from typing import Any

if importlib.util.find_spec("torch") is not None:
    import torch
    import torch.distributed as dist
    from torch_plugin import stand_in

CHUNKS = [4 << 20, 8]


def join(seconds: float = 30.0, chunk_bytes: int = CHUNKS[0], backend: str = "procgroup") -> None:
    """Initialise with the stand-in, whose streams are late by other times on each rank."""
    from procgroup import torch_plugin
    from procgroup.torch_plugin import host_tensors

    stand_in.register()
    torch_plugin.register()
    host_tensors.CHUNK_BYTES = chunk_bytes
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))


def on_device(*values: float) -> Any:
    return stand_in.on_device(torch.tensor(values))
