"""The tensors inside of whatever a module returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from procgroup.parallel.pytorch import torch

_DEPTH = 20


def find_tensors(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the tensors in a tensor, list, tuple, dict, dataclass, or another object's attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, (str, bytes, int, float, torch.nn.Module)):
        return
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from find_tensors(entry, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for entry in value:
            yield from find_tensors(entry, depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for entry in vars(value).values():
            yield from find_tensors(entry, depth - 1)
