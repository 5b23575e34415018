"""The arguments with which torch calls a process group's methods, brought to one form: lists, options, reduce ops."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed

from procgroup.types import AnyReduceOp, PremulSum, ReduceOp

_TORCH = distributed.ReduceOp

# By hash, which torch makes of the op's number: to compare two of its objects takes longer than a small call. The names
# are torch's, which lacks some of the ops.
_BY_HASH: dict[int, AnyReduceOp] = {
    hash(_TORCH(number)): ReduceOp[name]
    for name, number in _TORCH.RedOpType.__members__.items()
    if name in ReduceOp.__members__ and name != ReduceOp.PREMUL_SUM.name
}


def listed(tensors: Any) -> Any:
    """Return a list of tensors for one tensor, and a list as it is."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def nested(tensors: Any) -> Any:
    """Return a list of lists for a list of tensors, and a list of lists as it is."""
    return [tensors] if tensors and not isinstance(tensors[0], (list, tuple)) else tensors


def options(kind: Any, given: Any, timeout: timedelta | None, **fields: Any) -> Any:
    """Return the options object that was given, or one of its ``kind`` with these fields and timeout.

    ``given`` may be the first of the fields instead, as torch lets the reduce op and the root follow the tensors.
    """
    if isinstance(given, kind):
        return given
    made = kind()
    names = iter(fields)
    if given is not None:
        fields[next(names)] = given
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout
    return made


def only(tensors: Any) -> Any:
    """Return the one tensor, or list of tensors, of a list. Raises ValueError for another number of them."""
    if len(tensors) != 1:
        raise ValueError(f"expected a list of 1, the tensor or list of tensors of this rank, got {len(tensors)}")
    return tensors[0]


def limit_of(options: Any) -> timedelta | None:
    """Return the timeout of an options object; None, which is the group's own, where none was set."""
    timeout: timedelta = options.timeout
    return None if timeout.days < 0 else timeout


def reduce_op(op: Any) -> AnyReduceOp:
    """Return procgroup's reduce op for torch's ReduceOp. Options objects hold no other: torch sees to it."""
    found = _BY_HASH.get(hash(op))
    if found is not None:
        return found
    factor = op.__getstate__()[1]  # PREMUL_SUM always has one: torch makes none without
    return PremulSum(factor.item() if isinstance(factor, torch.Tensor) else factor)
