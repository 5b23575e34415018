"""A world of 1 takes what a world of 2 takes, and refuses what it refuses, with the same kind of error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from operation_table import REDUCING, Part

import procgroup as dist
from oracle import DTYPES, Array
from procgroup.testing import run_ranks
from procgroup.types import AnyReduceOp

OPS: list[AnyReduceOp] = [*dist.ReduceOp, dist.ReduceOp.PREMUL_SUM(2.0)]


def outcome(call: Callable[[], object]) -> tuple[str, str]:
    """Return ("", "") when a call went well, else its error's type and text."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def every_reduction(dtype: str) -> dict[str, tuple[str, str]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [Reduction(name, rank, size, op=op, count=3, dtype=dtype) for name in REDUCING for op in OPS]
    return {f"{part.name} {part.op!r}": outcome(partial(part.start, dist)) for part in parts}


class Reduction(Part):
    """A reduction whose result nobody looks at."""

    def combined(self, blocks: Sequence[Array]) -> Array:
        return blocks[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_are_refused_alike(dtype: str) -> None:
    (alone,) = run_ranks(every_reduction, 1, dtype)
    together = run_ranks(every_reduction, 2, dtype)[0]
    kinds = {name: kind for name, (kind, _) in together.items()}
    assert {name: kind for name, (kind, _) in alone.items()} == kinds
    for name, (_, text) in alone.items():
        assert ("is not defined for" in text) == ("is not defined for" in together[name][1])


def read_only(count: int) -> np.ndarray:
    array = np.zeros(count)
    array.flags.writeable = False
    return array


def every_misuse() -> dict[str, str]:
    size = dist.get_world_size()
    good, short, other = np.ones(4), np.ones(3), np.ones(4, np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce of text": lambda: dist.all_reduce("text"),
        "all_reduce of read-only": lambda: dist.all_reduce(read_only(4)),
        "all_reduce of objects": lambda: dist.all_reduce(np.array([None])),
        "all_gather into short": lambda: dist.all_gather([short] * size, good),
        "all_gather into another dtype": lambda: dist.all_gather([other.copy() for _ in range(size)], good),
        "all_gather into too few": lambda: dist.all_gather([good] * (size - 1), good),
        "all_gather into an array": lambda: dist.all_gather(good, good),
        "all_gather_single into short": lambda: dist.all_gather_single(short, good),
        "all_gather_single into another dtype": lambda: dist.all_gather_single(np.ones(4 * size, np.int8), good),
        "reduce_scatter of short": lambda: dist.reduce_scatter(good, [short] * size),
        "reduce_scatter_single of short": lambda: dist.reduce_scatter_single(np.ones(4), np.ones(4 * size - 1)),
        "gather without a list": lambda: dist.gather(good, None, group_dst=dist.get_rank()),
        "scatter without a list": lambda: dist.scatter(good, None, group_src=dist.get_rank()),
        "all_to_all of nothing": lambda: dist.all_to_all([np.ones(4)] * size, [None] * size),
        "splits that do not add up": lambda: dist.all_to_all_single(np.ones(4), good, [9] * size, None),
        "too many splits": lambda: dist.all_to_all_single(np.ones(4), good, None, [1] * (size + 1)),
        "negative splits": lambda: dist.all_to_all_single(np.ones(4), good, None, [-1] * size),
        "a tag that is no int": lambda: dist.isend(good, (dist.get_rank() + 1) % size, tag="a"),
    }
    return {name: outcome(call)[0] for name, call in calls.items()}


def test_misuse_is_refused_alike() -> None:
    (alone,) = run_ranks(every_misuse, 1)
    together = run_ranks(every_misuse, 2)[0]
    assert all(together.values()), together
    for name, kind in alone.items():
        assert kind == together[name] or {kind, together[name]} <= {"ValueError", "ArgumentError"}, name
