"""The mean of integers: one meaning in every operation that reduces, on every transport, and alone.

It is the exact sum, which does not overflow, divided by the number of ranks and truncated toward zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from operation_table import REDUCING, Part

import procgroup as dist
from oracle import INTEGERS, Array
from procgroup import functional
from procgroup.testing import run_ranks
from procgroup.types import ReduceOp

COUNT = 4099


def values(name: str, rank: int) -> Array:
    """Elements next to zero of either sign, and the extremes: any two of these overflow."""
    limits = np.iinfo(name)
    near_zero = [number for number in range(-7, 8) if number >= limits.min]
    choices = np.array([limits.min, limits.min + 1, limits.max, limits.max - 1, *near_zero], name)
    return np.random.default_rng([COUNT, rank]).choice(choices, COUNT)


def mean(blocks: Sequence[Array]) -> Array:
    """Return the truncated mean as Python's integers give it."""
    totals = [sum(column) for column in zip(*(block.tolist() for block in blocks), strict=True)]
    return np.array([abs(total) // len(blocks) * (-1 if total < 0 else 1) for total in totals], blocks[0].dtype)


class Mean(Part):
    """A part that averages."""

    def block(self, source: int, target: int = 0) -> Array:
        return values(self.dtype.name, source)

    def combined(self, blocks: Sequence[Array]) -> Array:
        return mean(blocks)


def compare() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in INTEGERS:
        for operation, async_op in product(REDUCING, (False, True)):
            part = Mean(operation, rank, size, root=size - 1, op="AVG", dtype=name)
            part.start(dist, async_op)
            part.wait()
            assert not part.wrong(), f"{operation} of {name} on {size} ranks: {part.wrong()}"
        given, wanted = values(name, rank), mean([values(name, source) for source in range(size)])
        for what, got in other_ways(given).items():
            np.testing.assert_array_equal(got, wanted, f"{what} of {name} on {size} ranks", strict=True)


def other_ways(given: Array) -> dict[str, Array]:
    coalesced, every_second = given.copy(), np.zeros(2 * COUNT, given.dtype)[::2]
    dist.all_reduce_coalesced([coalesced[:7], coalesced[7:11], coalesced[11:]], ReduceOp.AVG)
    every_second[:] = given
    dist.all_reduce(every_second, ReduceOp.AVG)
    functionally = functional.all_reduce({"a": given}, ReduceOp.AVG)["a"]
    return {"coalesced": coalesced, "every second": every_second, "functional": functionally}


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
