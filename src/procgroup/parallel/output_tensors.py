"""The tensors inside of whatever a module returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from procgroup.parallel.pytorch import torch

_DEPTH = 20


def find_tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in a tensor, list, tuple, dict, dataclass, or another object's attributes; each once."""
    seen: set[int] = set()
    waiting = [(value, _DEPTH)]
    while waiting:
        found, depth = waiting.pop()
        if id(found) in seen:
            continue  # objects may point at each other
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            yield found
        elif depth:
            waiting += [(entry, depth - 1) for entry in _entries(found)]


def _entries(value: Any) -> Iterable[Any]:
    if value is None or isinstance(value, (str, bytes, int, float, type, torch.nn.Module)):
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set)):
        return value
    return vars(value).values() if hasattr(value, "__dict__") else ()
