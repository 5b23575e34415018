"""torch's reduce ops as procgroup's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as distributed

from procgroup.types import AnyReduceOp, PremulSum, ReduceOp

_TORCH = distributed.ReduceOp

# By hash, which torch makes of the op's number: to compare two of its objects takes longer than a small call.
_BY_HASH: dict[int, AnyReduceOp] = {
    hash(_TORCH(getattr(_TORCH.RedOpType, op.name))): op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM
}


def reduce_op(op: Any) -> AnyReduceOp:
    """Return procgroup's reduce op for torch's. Raises TypeError for what is none, or lacks its factor."""
    found = _BY_HASH.get(hash(op))
    return _other(op) if found is None or op.__class__ is not _TORCH else found


def _other(op: Any) -> AnyReduceOp:
    """The same for an op that was given by its number, and for PREMUL_SUM, which has a factor."""
    if isinstance(op, _TORCH.RedOpType):
        return reduce_op(_TORCH(op))
    if not isinstance(op, _TORCH):
        raise TypeError(f"expected a torch.distributed.ReduceOp, got {op!r} of type {type(op).__name__}")
    state = op.__getstate__()
    if not isinstance(state, tuple):
        raise TypeError(
            "ReduceOp.PREMUL_SUM needs a factor, and got none. "
            "Make it with torch.distributed._make_nccl_premul_sum(factor)."
        )
    factor = state[1]
    return PremulSum(factor.item() if isinstance(factor, torch.Tensor) else factor)
