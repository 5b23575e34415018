"""deterministic="order": the same bits from every transport, size and operation, those of a sum in rank order."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from collectives.contract_cases import TRANSPORTS
from operation_table import REDUCING, Part

import procgroup as dist
from oracle import HALVES, Array, numpy_dtype
from procgroup.errors import CollectiveMismatch
from procgroup.testing import run_ranks
from world import placed, run

DTYPES = ["float32", *HALVES]
COUNTS = [1, 13, 4099, 140_003]
"""Small enough to travel with the call, in one segment, in many."""


def values(dtype: str, count: int, rank: int) -> Array:
    """Numbers of very different size: another order of summation gives other bits."""
    random = np.random.default_rng([count, rank])
    return (random.standard_normal(count) * 10.0 ** random.integers(-2, 3, count)).astype(numpy_dtype(dtype))


class InRankOrder(Part):
    """A part whose result is (((in0 + in1) + in2) + ...) in float32, rounded once."""

    to_the_bit = True

    def block(self, source: int, target: int = 0) -> Array:
        return values(self.dtype.name, self.count, source)


def what_differs(rank: int, size: int) -> list[str]:
    """Reduce in every way; return what is not the sum in rank order."""
    wrong = []
    for name, dtype, count in product(REDUCING, DTYPES, COUNTS):
        for op in ("SUM", "AVG") if count < 5000 else ("SUM",):
            part = InRankOrder(name, rank, size, root=size - 1, op=op, count=count, dtype=dtype)
            part.start(dist)
            wrong += [f"{name} {op} of {count} {dtype}: {text}"] if (text := part.wrong()) else []
    return wrong


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [3, 4, 7])
def test_every_reduction_gives_the_bits_of_a_sum_in_rank_order(transport: str, size: int) -> None:
    def program() -> None:
        assert what_differs(dist.get_rank(), dist.get_world_size()) == []

    run_ranks(program, size, **placed(transport, size))


def promise(rank: int, size: int) -> list[str]:
    dist.init_process_group(timeout=60, deterministic="order")
    wrong = what_differs(rank, size)
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_that_promise_rank_order_give_it_whatever_the_layout(transport: str) -> None:
    assert run(promise, 4, timeout=250, environment={"PROCGROUP_TRANSPORT": transport}) == [[]] * 4


def promise_on_one_rank(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    group = dist.new_group([0, 1], deterministic="order" if rank == 0 else None)
    moved = np.full(3, rank)
    dist.broadcast(moved, 1, group=group)
    assert (moved == 1).all(), "the promise concerns reductions only"
    array = np.ones(3)
    with pytest.raises(CollectiveMismatch, match="ordered"):
        dist.all_reduce(array, group=group)
    assert (array == 1).all()


def test_a_promise_that_one_rank_did_not_make_is_a_mismatch() -> None:
    run(promise_on_one_rank, 2)


@pytest.mark.parametrize("value", [True, "", "tree", 1])
def test_other_promises_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="`deterministic` to be None or 'order'"):
        dist.init_process_group(deterministic=value)  # type: ignore[arg-type]
    assert not dist.is_initialized()
