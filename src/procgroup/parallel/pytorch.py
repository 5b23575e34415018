"""PyTorch, for the files of this room that work on its modules: imported here only, and asked for in words."""

from __future__ import annotations

try:
    import torch as torch
except ImportError as _error:  # everything else in procgroup works without it
    raise ImportError(
        "procgroup.parallel.DistributedDataParallel wraps PyTorch's modules, and PyTorch is not installed. "
        "Install it with: pip install torch"
    ) from _error
