"""How many accelerators this process may use, found without loading a driver's library."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs: those that CUDA_VISIBLE_DEVICES names, else those with a device file."""
    present = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if present and named is not None:
        return len([name for name in named.split(",") if name.strip() not in ("", "-1")])
    return present
