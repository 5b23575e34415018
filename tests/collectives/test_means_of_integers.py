"""The mean of integers: one meaning in every operation that reduces, on every transport, and alone.

It is the exact sum, which does not overflow, divided by the number of ranks and truncated toward zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import procgroup as dist
from oracle import INTEGERS, Array
from procgroup import functional
from procgroup.testing import run_ranks
from procgroup.types import ReduceOp

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:`torch.distributed.all_reduce_coalesced` will be deprecated:FutureWarning"),
]

COUNT = 4099


def values(name: str, rank: int) -> Array:
    """Elements next to zero of either sign, and the extremes: any two of these overflow."""
    limits = np.iinfo(name)
    near_zero = [number for number in range(-7, 8) if number >= limits.min]
    choices = np.array([limits.min, limits.min + 1, limits.max, limits.max - 1, *near_zero], name)
    return np.random.default_rng([COUNT, rank]).choice(choices, COUNT)


def mean(name: str, size: int) -> Array:
    """Return the truncated mean as Python's integers give it."""
    totals = [sum(column) for column in zip(*(values(name, rank).tolist() for rank in range(size)), strict=True)]
    return np.array([abs(total) // size * (-1 if total < 0 else 1) for total in totals], name)


def every_reduction(name: str) -> dict[str, Array]:
    rank, size = dist.get_rank(), dist.get_world_size()
    given = values(name, rank)
    got: dict[str, Array] = {verb: given.copy() for verb in ("all_reduce", "async", "reduce", "coalesced")}
    dist.all_reduce(got["all_reduce"], ReduceOp.AVG)
    work = dist.all_reduce(got["async"], ReduceOp.AVG, async_op=True)
    assert work is not None
    work.wait()
    dist.reduce(got["reduce"], size - 1, ReduceOp.AVG)
    if rank != size - 1:
        got["reduce"] = mean(name, size)
    dist.all_reduce_coalesced([got["coalesced"][:7], got["coalesced"][7:11], got["coalesced"][11:]], ReduceOp.AVG)
    got["reduce_scatter"] = np.empty_like(given)
    dist.reduce_scatter(got["reduce_scatter"], [given] * size, ReduceOp.AVG)
    got["reduce_scatter_single"] = np.empty_like(given)
    dist.reduce_scatter_single(got["reduce_scatter_single"], np.concatenate([given] * size), ReduceOp.AVG)
    got["functional"] = functional.all_reduce({"a": given}, ReduceOp.AVG)["a"]
    got["every second"] = np.zeros(2 * COUNT, name)[::2]
    got["every second"][:] = given
    dist.all_reduce(got["every second"], ReduceOp.AVG)
    return got


def compare() -> None:
    size = dist.get_world_size()
    for name in INTEGERS:
        wanted = mean(name, size)
        for what, got in every_reduction(name).items():
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted, f"{what} of {name} on {size} ranks")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
def test_every_reduction_over_shared_memory_has_the_truncated_mean(size: int) -> None:
    run_ranks(compare, size)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_every_reduction_over_tcp_has_the_truncated_mean(size: int) -> None:
    run_ranks(compare, size, transport="tcp")


@pytest.mark.parametrize("size", [1, 2])
def test_bools_have_no_mean(size: int) -> None:
    def refuse() -> None:
        calls: list[Any] = [
            lambda flags: dist.all_reduce(flags, ReduceOp.AVG),
            lambda flags: dist.reduce(flags, 0, ReduceOp.AVG),
            lambda flags: dist.all_reduce_coalesced([flags], ReduceOp.AVG),
        ]
        for call in calls:
            flags = np.ones(3, bool)
            with pytest.raises(dist.ArgumentError, match=r"ReduceOp\.AVG is not defined for bool arrays"):
                call(flags)
            assert flags.all()
        dist.barrier()

    run_ranks(refuse, size)
