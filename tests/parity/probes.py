"""Programs of two ranks in which torch does something that no case can say: another call on each rank, say.

Each returns on every rank what came out of it, as text, or raises. torch must give what its entry says, and procgroup
must not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from seeded_cases import as_torch


@dataclass(frozen=True)
class Probe:
    """A program, and what each rank of torch and of procgroup gets from it: patterns of its text or its exception."""

    what: str
    torch: str
    ours: str
    program: Callable[[Any, int], str]
    seen_in_torch: tuple[str, str]
    seen_in_ours: tuple[str, str]


def _another_reduce_op(dist: Any, rank: int) -> str:
    array = as_torch(np.full(4, 2 + rank))
    dist.all_reduce(array, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    return str(array.tolist())


def _three_rows_for_two_ranks(dist: Any, rank: int) -> str:
    output = as_torch(np.zeros(3, np.int64))
    dist.all_to_all_single(output, as_torch(np.arange(3) + 10 * rank))
    return "accepted"


def _stacked(dist: Any, rank: int) -> str:
    output = as_torch(np.zeros((2, 3), np.int64))
    dist.all_gather_single(output, as_torch(np.full(3, rank)))
    return str(output.tolist())


PROBES = [
    Probe(
        "all_reduce with SUM on one rank and MAX on the other",
        "silently wrong numbers on both",
        "`CollectiveMismatch` on both, and no array has changed",
        _another_reduce_op,
        (r"\[.*5.*3.*\]", r"\[.*5.*3.*\]"),
        ("CollectiveMismatch", "CollectiveMismatch"),
    ),
    Probe(
        "all_to_all_single of 3 rows over 2 ranks, without split sizes",
        "accepted",
        "refused: 3 rows cannot be divided",
        _three_rows_for_two_ranks,
        ("accepted", "accepted"),
        ("Error: ", "Error: "),
    ),
    Probe(
        "all_gather_single into a stacked output, of shape (ranks, *shape)",
        "refused",
        "stacked",
        _stacked,
        ("RuntimeError", "RuntimeError"),
        (r"\[\[0, 0, 0\], \[1, 1, 1\]\]", r"\[\[0, 0, 0\], \[1, 1, 1\]\]"),
    ),
]
"""Each is played in a world of its own, since a group may be broken after it."""
