"""Ranks that make different calls: each error names every rank's call, no array changes, the group has ended."""

from __future__ import annotations

import time
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, allowance, on
from seeded_cases import Case, CasePart

import procgroup as dist
from world import run


def call_of(operation: str, dtype: str, count: int, op: str = "SUM", root: int = 0) -> Case:
    return Case(operation, dtype, count, op, root, values="accumulated")


CALLS = [
    call_of("all_reduce", "float32", 8),
    call_of("all_reduce", "float32", 8, "MAX"),
    call_of("all_reduce", "int32", 8),
    call_of("all_reduce", "float32", 9),
    call_of("all_reduce", "float32", 0),
    call_of("all_reduce", "float32", 600_000),
    call_of("all_reduce", "float64", 600_000),
    call_of("all_reduce", "float64", 600_000, "AVG"),
    call_of("reduce", "float32", 8),
    call_of("reduce", "float32", 8, root=1),
    call_of("reduce", "float32", 8, "MIN", root=1),
    call_of("broadcast", "float32", 8),
    call_of("broadcast", "float32", 8, root=1),
    call_of("broadcast", "float32", 600_000, root=1),
    call_of("all_gather", "float32", 8),
    call_of("all_gather", "float32", 200_000),
    call_of("barrier", "float32", 0),
    call_of("scan", "float32", 8),
    call_of("exscan", "float32", 8),
    call_of("exscan", "float32", 8, "MAX"),
    call_of("scan", "float32", 600_000),
]
EVERY_PAIR = list(combinations(range(len(CALLS)), 2))
NEIGHBOURS = [
    (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (5, 6), (6, 7), (0, 8), (8, 9), (9, 10), (0, 11), (11, 12), (12, 13),
    (8, 11), (0, 14), (14, 15), (0, 16), (11, 16), (0, 17), (17, 18), (18, 19), (17, 20),
]  # fmt: skip
"""Pairs that differ in one thing only, or in the operation."""


def call_differently(rank: int, size: int, calls: list[Case]) -> Any:
    dist.init_process_group(timeout=20)
    before = np.ones(4)
    dist.all_reduce(before)
    part = CasePart(calls[rank], rank, size)
    started = time.monotonic()
    with pytest.raises(dist.CollectiveMismatch) as mismatch:
        part.start(dist, async_op=rank % 2 == 1)
        part.wait()
        dist.barrier()  # a rank that did not wait for all others learns it here
    took = time.monotonic() - started
    assert mismatch.value.intact is False or not part.changed()
    started = time.monotonic()
    with pytest.raises(dist.GroupBroken) as caught:
        dist.all_reduce(np.ones(4))
    assert time.monotonic() - started < allowance(0.2)
    assert "different calls" in caught.value.reason
    dist.destroy_process_group()
    return mismatch.value.calls, took, str(mismatch.value)


def expect_mismatch(calls: list[Case], transport: str) -> None:
    results = run(call_differently, len(calls), args=(calls,), environment=on(transport))
    described = results[0][0]
    assert sorted(described) == list(range(len(calls))), described
    for rank, (seen, took, text) in enumerate(results):
        assert seen == described, "each rank raises the same error"
        assert took < allowance(1.0), f"rank {rank} raised after {took:.2f} s"
        assert f"rank {rank} of {len(calls)}" in text
    for rank, call in enumerate(calls):
        text = described[rank]
        assert call.operation in text
        if call.operation != "barrier":
            assert call.dtype in text and str(call.count) in text, text
        if call.row.reduces:
            assert call.op in text, text
        if call.row.root:
            assert f"root {call.root}" in text or f"root={call.root}" in text or f"rank {call.root}" in text, text
    for one, call in enumerate(calls):
        for other, another in enumerate(calls):
            assert (described[one] == described[other]) == (call == another), described


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("pair", NEIGHBOURS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_one_rank_of_three_that_differs_is_named_on_all(transport: str, pair: tuple[int, int]) -> None:
    odd = sum(pair) % 3
    expect_mismatch([CALLS[pair[rank == odd]] for rank in range(3)], transport)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("pair", EVERY_PAIR, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_every_pair_of_different_calls_is_named(transport: str, pair: tuple[int, int]) -> None:
    for size, odd in ((2, 1), (4, sum(pair) % 4)):
        expect_mismatch([CALLS[pair[rank == odd]] for rank in range(size)], transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_all_differ_are_all_named(transport: str) -> None:
    expect_mismatch([CALLS[index] for index in (0, 5, 9, 12, 14, 16, 2)], transport)


def skip_one_call(rank: int, size: int) -> Any:
    """Rank 1 leaves a call out, so that its next meets the others' former one."""
    dist.init_process_group(timeout=20)
    errors: list[str] = []
    for number in range(3):
        if rank == 1 and number == 1:
            continue
        try:
            dist.all_reduce(np.ones(10 + number))
        except dist.DistError as error:
            errors.append(type(error).__name__)
    return errors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_that_one_rank_leaves_out_is_found_at_the_next(transport: str) -> None:
    results = run(skip_one_call, 3, environment=on(transport))
    assert all(errors[0] == "CollectiveMismatch" for errors in results), results


def same_call_in_other_forms(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    shapes: list[tuple[int, ...]] = [(12,), (3, 4), (2, 2, 3)]
    array = np.full(shapes[rank % 3], rank, np.float64)
    work: Any = dist.all_reduce(array, async_op=rank % 2 == 0, timeout=5 + rank)
    if work:
        work.wait()
    assert (array == sum(range(size))).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shape_async_and_timeout_may_differ(transport: str) -> None:
    run(same_call_in_other_forms, 4, environment=on(transport))


def receive_another_length(rank: int, size: int, sent: int, expected: int) -> None:
    dist.init_process_group(timeout=10)
    if rank == 0:
        work: Any = dist.isend(np.ones(sent), 1)
        if sent > 1000:
            with pytest.raises(dist.DistError):
                work.wait()
        return
    array = np.full(expected, 7.0)
    with pytest.raises(dist.CollectiveMismatch, match=f"recv of {expected} float64.*send of {sent} float64"):
        dist.recv(array, 0)
    assert (array == 7).all(), "the array has changed"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("sent", "expected"), [(5, 4), (4, 5), (500_000, 400_000), (400_000, 500_000)])
def test_a_message_of_another_length_is_refused(transport: str, sent: int, expected: int) -> None:
    run(receive_another_length, 2, args=(sent, expected), environment=on(transport))


def receive_another_dtype(rank: int, size: int) -> None:
    dist.init_process_group(timeout=10)
    if rank == 0:
        dist.isend(np.ones(4), 1)
        return
    array = np.full(4, 7)
    with pytest.raises(dist.CollectiveMismatch, match=r"recv of 4 int64.*send of 4 float64"):
        dist.recv(array, 0)
    assert (array == 7).all(), "the array has changed"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_of_another_dtype_is_refused(transport: str) -> None:
    run(receive_another_dtype, 2, environment=on(transport))
