"""What a PyTorch program may call on 3 ranks of backend "procgroup", each with what must come of it.

The files of calls enter theirs. Every function takes this rank and the number of ranks, and stands for one test.
"""

from __future__ import annotations

from typing import Any

import torch

CALLS: dict[str, Any] = {}


def call(function: Any) -> Any:
    CALLS[function.__name__] = function
    return function


def values(rank: int, *shape: int, dtype: Any = torch.float32) -> Any:
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) + 10 * rank).to(dtype)
