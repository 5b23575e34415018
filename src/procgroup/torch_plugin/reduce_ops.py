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
    """Return procgroup's reduce op for torch's ReduceOp. Options objects hold no other: torch sees to it."""
    found = _BY_HASH.get(hash(op))
    return _premul_sum(op) if found is None else found


def _premul_sum(op: Any) -> PremulSum:
    """The same for PREMUL_SUM, which always has a factor: torch makes none without."""
    factor = op.__getstate__()[1]
    return PremulSum(factor.item() if isinstance(factor, torch.Tensor) else factor)
