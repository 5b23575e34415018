"""Argument checks that need nothing but the arguments and the group. All raise before a byte is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procgroup.types import ReduceOp

MAX_TAG = (1 << 63) - 1


def reduce_op(op: Any) -> ReduceOp:
    """Return ``op`` as a ReduceOp. Raises TypeError for anything but a ReduceOp or its number."""
    if isinstance(op, int) and not isinstance(op, bool):
        try:
            return ReduceOp(op)
        except ValueError:
            pass
    raise TypeError(f"Expected parameter `op` to be one of {_op_names()}, got {op!r} of type {type(op).__name__}.")


def _op_names() -> str:
    return ", ".join(f"ReduceOp.{op.name}" for op in ReduceOp)


def tag(value: Any) -> int:
    """Return a message tag. Raises TypeError unless it is an int, ValueError unless it is in 0..2**63-1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"Expected parameter `tag` to be an int, got {value!r} of type {type(value).__name__}.")
    if not 0 <= value <= MAX_TAG:
        raise ValueError(f"Expected parameter `tag` to be between 0 and {MAX_TAG}, got {value}.")
    return value


def group_rank(value: Any, size: int, group_name: str) -> int:
    """Return a group rank. Raises TypeError unless it is an int, ValueError unless the group has it."""
    rank = as_index(value, "group rank")
    if not 0 <= rank < size:
        raise ValueError(
            f"Group rank {rank} is not part of group {group_name}, which has {size} ranks: 0 to {size - 1}."
        )
    return rank


def as_index(value: Any, name: str) -> int:
    """Return a rank given as int or as a NumPy integer. Raises TypeError for anything else."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"Expected the {name} to be an int, got {value!r} of type {type(value).__name__}.")
    return int(value.__index__())


def array_list(arrays: Any, size: int, name: str) -> Sequence[Any]:
    """Return a list of one array per rank.

    Raises TypeError unless it is a list or tuple, ValueError unless it has ``size`` elements.
    """
    if not isinstance(arrays, (list, tuple)):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` to be a list of arrays "
            f"but got {type(arrays)} instead."
        )
    if len(arrays) != size:
        raise ValueError(f"invalid output list `{name}`: expected length {size}, one per rank, got {len(arrays)}.")
    return arrays
