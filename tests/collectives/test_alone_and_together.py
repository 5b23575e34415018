"""A world of 1 takes what a world of 2 takes, and refuses what it refuses, with the same kind of error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import procgroup as dist
from procgroup.testing import run_ranks
from procgroup.types import AnyReduceOp

_DTYPES = """
    bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128
    float8_e4m3fn float8_e5m2
"""
OPS: list[AnyReduceOp] = [*dist.ReduceOp, dist.ReduceOp.PREMUL_SUM(2.0)]


def ones(dtype: str, count: int) -> np.ndarray:
    return np.ones(count).astype(getattr(ml_dtypes, dtype, dtype))


def outcome(call: Callable[[], object]) -> tuple[str, str]:
    """Return ("", "") when a call went well, else its error's type and text."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def every_reduction(dtype: str) -> dict[str, tuple[str, str]]:
    size = dist.get_world_size()
    outcomes = {}
    for op in OPS:
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda op=op: dist.all_reduce(ones(dtype, 3), op),
            "reduce": lambda op=op: dist.reduce(ones(dtype, 3), 0, op),
            "reduce_scatter": lambda op=op: dist.reduce_scatter(ones(dtype, 3), [ones(dtype, 3)] * size, op),
            "reduce_scatter_single": lambda op=op: dist.reduce_scatter_single(
                ones(dtype, 3), ones(dtype, 3 * size), op
            ),
        }
        outcomes |= {f"{verb} {op!r}": outcome(call) for verb, call in calls.items()}
    return outcomes


@pytest.mark.parametrize("dtype", _DTYPES.split())
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
