"""Argument checks that need nothing but the arguments and the group. All raise before a byte is sent."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from procgroup.errors import ArgumentError
from procgroup.types import AnyReduceOp, PremulSum, ReduceOp

MAX_TAG = (1 << 63) - 1

# PREMUL_SUM means nothing without its factor.
_NUMBERS = frozenset(int(op) for op in ReduceOp if op is not ReduceOp.PREMUL_SUM)


def reduce_op(op: Any) -> AnyReduceOp:
    """Return ``op`` as a ReduceOp or PremulSum. Raises TypeError for anything but these and a ReduceOp's number."""
    if isinstance(op, PremulSum):
        return op
    if isinstance(op, int) and not isinstance(op, bool) and op in _NUMBERS:
        return ReduceOp(op)
    names = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
    raise TypeError(f"Expected parameter `op` to be one of {names}, got {op!r} of type {type(op).__name__}.")


def tag(value: Any) -> int:
    """Return a message tag. Raises TypeError unless it is an int, ValueError unless it is in 0..2**63-1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"Expected parameter `tag` to be an int, got {value!r} of type {type(value).__name__}.")
    if not 0 <= value <= MAX_TAG:
        raise ValueError(f"Expected parameter `tag` to be between 0 and {MAX_TAG}, got {value}.")
    return value


def group_rank(value: Any, size: int, group_name: str) -> int:
    """Return a group rank. Raises TypeError unless it is an int, ValueError unless the group has it."""
    if value.__class__ is int and 0 <= value < size:  # first: a small call takes less time than a few Python frames
        return value
    rank = as_index(value, "group rank")
    if not 0 <= rank < size:
        raise ValueError(
            f"Group rank {rank} is not part of group {group_name}, which has {size} ranks: 0 to {size - 1}."
        )
    return rank


def as_index(value: Any, name: str, where: str = "") -> int:
    """Return a rank given as int or as a NumPy integer. Raises TypeError for anything else, with ``where`` in front."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{where}Expected the {name} to be an int, got {value!r} of type {type(value).__name__}.")
    return int(value.__index__())


def array_list(arrays: Any, size: int, name: str, op: str, rank: int, each: str = "rank") -> Sequence[Any]:
    """Return a list of one array per rank, or per ``each``. Errors name the call and this rank.

    Raises TypeError unless it is a list or tuple, ValueError unless it has ``size`` elements.
    """
    if not isinstance(arrays, (list, tuple)):
        raise TypeError(
            f"{op} on rank {rank}: Invalid function argument. Expected parameter `{name}` to be a list of arrays "
            f"but got {type(arrays)} instead."
        )
    if len(arrays) != size:
        raise ValueError(
            f"{op} on rank {rank}: invalid list `{name}`: expected length {size}, one per {each}, got {len(arrays)}."
        )
    return arrays


def same_dtype(arrays: Iterable[Any]) -> None:
    """Raise ValueError when the arrays have different dtypes."""
    found = dict.fromkeys(array.dtype for array in arrays if hasattr(array, "dtype"))  # their names take much longer
    dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in found)
    if len(dtypes) > 1:
        raise ValueError(f"Invalid usage of tensors with different dtypes: found {' and '.join(dtypes)}.")


def gather_list(arrays: Any, size: int, root: int, rank: int) -> Sequence[Any] | None:
    """Return the list that gather fills: one array per rank on the destination, which is ``root``, None elsewhere.

    Raises ValueError when it is missing there or given elsewhere, and what ``array_list`` raises.
    """
    return _list_of_root(arrays, size, root, rank, "gather", "destination")


def scatter_list(arrays: Any, size: int, root: int, rank: int) -> Sequence[Any] | None:
    """Return the list that scatter sends: one array per rank on the source, which is ``root``, None elsewhere.

    Raises ValueError when it is missing there or given elsewhere, and what ``array_list`` raises.
    """
    return _list_of_root(arrays, size, root, rank, "scatter", "source")


def _list_of_root(arrays: Any, size: int, root: int, rank: int, op: str, side: str) -> Sequence[Any] | None:
    if arrays.__class__ is list and rank == root and len(arrays) == size:  # first, as in group_rank
        return arrays
    # An array has no truth value, so only an empty list or tuple counts as none.
    given = arrays is not None and not (isinstance(arrays, (list, tuple)) and not arrays)
    if rank == root and given:
        return array_list(arrays, size, f"{op}_list", op, rank)
    if rank != root and not given:
        return None
    where = f"NOT be specified on non-{side} ranks; the {side} is" if given else f"be specified on {side}"
    raise ValueError(f"{op} on rank {rank}: Argument ``{op}_list`` must {where} rank {root}.")


def splits(sizes: Any, size: int, name: str, op: str, rank: int) -> list[int] | None:
    """Return how many rows each rank gets; None, which means equal parts, for None and for an empty list.

    Raises TypeError unless it is a sequence of ints, ArgumentError unless it has ``size`` entries of at least 0.
    """
    if sizes is None or (isinstance(sizes, (list, tuple)) and not sizes):
        return None
    where = f"{op} on rank {rank}: "
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
        raise TypeError(
            f"{where}Invalid function argument. Expected parameter `{name}` to be a list of int "
            f"but got {type(sizes)} instead."
        )
    rows = [as_index(rows, f"entry of `{name}`", where) for rows in sizes]
    if len(rows) != size:
        raise ArgumentError(
            f"{where}Number of tensor splits not equal to group size: `{name}` has {len(rows)} entries, "
            f"expected {size}."
        )
    if min(rows) < 0:
        raise ArgumentError(f"{where}`{name}` must not have negative entries, got {rows}.")
    if max(rows) > sys.maxsize:
        raise ArgumentError(f"{where}`{name}` must not have entries of more than {sys.maxsize}, got {rows}.")
    return rows


def mesh_shape(shape: Any, size: int, op: str, rank: int) -> tuple[int, ...]:
    """Return the extents of a Cartesian mesh of all ``size`` ranks.

    Raises TypeError unless it is a sequence of ints, ArgumentError unless they are positive and multiply to ``size``.
    """
    where = f"{op} on rank {rank}: "
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Iterable):
        raise TypeError(f"{where}Expected parameter `shape` to be a tuple of int, got {shape!r}.")
    extents = tuple(as_index(extent, "extent in `shape`", where) for extent in shape)
    if not extents or min(extents) < 1:
        raise ArgumentError(f"{where}`shape` must have one or more extents of at least 1, got {extents}.")
    if (ranks := math.prod(extents)) != size:
        raise ArgumentError(f"{where}`shape` {extents} is a mesh of {ranks} ranks, but the group has {size}.")
    return extents


def periodicity(periodic: Any, dimensions: int, op: str, rank: int) -> tuple[bool, ...]:
    """Return for each dimension of a mesh whether its last rank is the neighbour of its first.

    Raises TypeError unless it is one bool or a sequence of bools, ArgumentError unless it has one per dimension.
    """
    if _is_bool(periodic):
        return (bool(periodic),) * dimensions
    where = f"{op} on rank {rank}: "
    if isinstance(periodic, (str, bytes)) or not isinstance(periodic, Iterable):
        raise TypeError(f"{where}Expected parameter `periodic` to be a bool or a tuple of bool, got {periodic!r}.")
    flags = tuple(periodic)
    for flag in flags:
        if not _is_bool(flag):
            raise TypeError(f"{where}Expected the entries of `periodic` to be bools, got {flag!r}.")
    if len(flags) != dimensions:
        raise ArgumentError(
            f"{where}`periodic` has {len(flags)} entries, expected {dimensions}, one per dimension of `shape`."
        )
    return tuple(map(bool, flags))


def _is_bool(value: Any) -> bool:
    """Return whether it is a bool of Python or NumPy, or 0 or 1, as MPI has them."""
    return (isinstance(value, int) or getattr(value, "shape", None) == ()) and value in (0, 1)
