"""That all ranks have wrapped the same model, and that they begin with the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from procgroup.api.objects import all_gather_object
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.training_errors import ModelMismatch

_NOTHING = "nothing"


def require_same_model(group: ProcessGroup, named_parameters: Sequence[tuple[str, Any]]) -> None:
    """Raise ModelMismatch on every rank when the parameters differ in number, name, shape, dtype or layout."""
    mine = [_describe(name, parameter) for name, parameter in named_parameters]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    digests = bytearray(len(digest) * group.size())
    group.all_gather_single(digests, bytearray(digest))
    differing = [
        rank for rank in range(group.size()) if not digests.startswith(digests[: len(digest)], len(digest) * rank)
    ]
    if not differing:
        return
    models: list[Any] = [None] * group.size()
    all_gather_object(models, mine, group, safe=True)
    expected, got = _first_difference(models[0], models[differing[0]])
    raise ModelMismatch(expected=expected, got=got, rank=differing[0], ranks=differing)


def broadcast_tensors(group: ProcessGroup, tensors: Sequence[Any], root: int) -> None:
    """Copy the values of tensors, parameters and buffers alike, from one rank to all."""
    for tensor in tensors:
        group.broadcast(tensor.detach(), root)


def _describe(name: str, parameter: Any) -> str:
    grad = "" if parameter.requires_grad else ", without gradient"
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{name} {tuple(parameter.shape)} {dtype}, strides {tuple(parameter.stride())}{grad}"


def _first_difference(expected: Sequence[str], got: Sequence[str]) -> tuple[str, str]:
    for place in range(max(len(expected), len(got))):
        pair = tuple(model[place] if place < len(model) else _NOTHING for model in (expected, got))
        if pair[0] != pair[1]:
            return pair[0], pair[1]
    raise AssertionError("the models do not differ")
