"""Floating point: whatever the values, every rank gets the same bits, and they are near the true result."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from collectives.contract_cases import TRANSPORTS

import procgroup as dist
from oracle import FLOATS, Array, digest, numpy_dtype
from procgroup.types import ReduceOp
from world import run

OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
COUNTS = [1, 5, 4099, 140_001]
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0]
MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}


@cache
def wild_values(dtype: str, count: int, rank: int) -> Array:
    """Values of very different size and both signs; every tenth is special, some are NaNs with a payload."""
    random = np.random.default_rng([count, rank])
    wild = random.standard_normal(count) * 10.0 ** random.integers(-2, 2, count)
    wild = np.where(random.random(count) < 0.1, random.choice(SPECIAL, count), wild)
    array = wild.astype(numpy_dtype(dtype))
    payload = np.isnan(array) & (random.random(count) < 0.5)
    unsigned = array.view(f"u{array.dtype.itemsize}")
    unsigned[payload] |= np.array(rank + 1, unsigned.dtype)
    array.flags.writeable = False
    return array


def true_result(op: ReduceOp, inputs: list[Array]) -> tuple[Array, Array]:
    """Return the result in the widest type, and how large the numbers on the way to it are."""
    wide = np.stack([array.astype(np.longdouble) for array in inputs])
    with np.errstate(all="ignore"):
        magnitude = np.abs(wide).sum(axis=0)
        if op == ReduceOp.SUM:
            return wide.sum(axis=0), magnitude
        if op == ReduceOp.AVG:
            return wide.sum(axis=0) / len(inputs), magnitude
        if op == ReduceOp.PRODUCT:
            return wide.prod(axis=0), np.abs(wide.prod(axis=0))
        return (wide.min(axis=0) if op == ReduceOp.MIN else wide.max(axis=0)), np.zeros(wide.shape[1])


def reduce_wild_values(rank: int, size: int) -> list[tuple[str, str]]:
    dist.init_process_group(timeout=20)
    seen = []
    for dtype in FLOATS:
        for op in OPS:
            for count in COUNTS:
                array = wild_values(dtype, count, rank).copy()
                dist.all_reduce(array, op)
                wrong = "" if rank or count > 5000 else judge(op, dtype, count, size, array)
                seen.append((f"{op.name} of {count} {dtype}: {wrong}" if wrong else "", digest(array)))
    return seen


def judge(op: ReduceOp, dtype: str, count: int, size: int, got: Array) -> str:
    want, magnitude = true_result(op, [wild_values(dtype, count, rank) for rank in range(size)])
    wide = got.astype(np.longdouble)
    if not np.array_equal(np.isnan(wide), np.isnan(want)):
        return "other elements are NaN than should be"
    largest = float(np.finfo(np.float32).max) if dtype != "float16" else 65504.0
    settled = np.isfinite(want) & (magnitude < largest / size)
    infinite = np.isinf(want)
    if not np.array_equal(wide[infinite], want[infinite]):
        return "other elements are infinite than should be"
    tiny = 2.0**-24 if dtype == "float16" else 2.0**-120
    with np.errstate(all="ignore"):
        bound = size * (magnitude * 2.0 ** -MANTISSA[dtype] + tiny)
        far = settled & ~(np.abs(wide - want) <= bound)
    return f"{int(far.sum())} elements are too far off, such as {wide[far][0]} for {want[far][0]}" if far.any() else ""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_all_ranks_get_the_same_bits_near_the_true_result(transport: str, size: int) -> None:
    seen: list[Any] = run(reduce_wild_values, size, timeout=50, environment={"PROCGROUP_TRANSPORT": transport})
    wrong = [text for text, _ in seen[0] if text]
    assert not wrong, wrong
    names = [f"{op.name} of {count} {dtype}" for dtype in FLOATS for op in OPS for count in COUNTS]
    differ = [name for number, name in enumerate(names) if len({rank[number][1] for rank in seen}) > 1]
    assert not differ, f"the ranks have different bits after {differ}"


def repeat_one_call(rank: int, size: int) -> set[str]:
    dist.init_process_group(timeout=20)
    seen = set()
    for _ in range(50):
        array = wild_values("float32", 30_000, rank).copy()
        dist.all_reduce(array)
        seen.add(digest(array))
    return seen


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_same_call_gives_the_same_bits_every_time(transport: str) -> None:
    seen = run(repeat_one_call, 4, environment={"PROCGROUP_TRANSPORT": transport})
    assert len(set().union(*seen)) == 1
