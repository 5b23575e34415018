"""Import PyTorch, for the modules of this package that need it, with an error that says how to install it."""

from __future__ import annotations

try:
    import torch as torch
except ImportError as _error:  # the rest of procgroup works without PyTorch
    raise ImportError(
        "procgroup.parallel.DistributedDataParallel wraps PyTorch's modules, and PyTorch is not installed. "
        "Install it with: pip install torch"
    ) from _error
