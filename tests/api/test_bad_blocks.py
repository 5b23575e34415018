"""Of several calls that are issued together all are checked first: with a bad one among them, no byte moves.

So a rank may correct its arguments and call again, while the others wait in their first call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.testing import run_ranks
from world import placed

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


def read_only(length: int) -> Any:
    array = np.ones(length)
    array.flags.writeable = False
    return array


def floats(length: int) -> Any:
    return np.ones(length)


def reduce_list(last: Callable[[int], Any], async_op: bool) -> None:
    future = dist.all_reduce_coalesced([np.ones(2), last(2)], async_op=async_op)
    assert future is None or future.wait()


def gather_lists(last: Callable[[int], Any], async_op: bool) -> None:
    size = dist.get_world_size()
    outputs = [[np.zeros(2), np.zeros(3)] for _ in range(size - 1)] + [[np.zeros(2), last(3)]]
    future = dist.all_gather_coalesced(outputs, [np.ones(2), np.ones(3)], async_op=async_op)
    assert future is None or future.wait()


def in_manager(call: Callable[..., Any], *arguments: tuple[Any, ...], async_op: bool) -> None:
    with dist._coalescing_manager(async_ops=async_op) as manager:
        for given in arguments:
            call(*given)
    manager.wait()


def reduce_in_manager(last: Callable[[int], Any], async_op: bool) -> None:
    in_manager(dist.all_reduce, (np.ones(2),), (last(2),), async_op=async_op)


def gather_in_manager(last: Callable[[int], Any], async_op: bool) -> None:
    whole = 2 * dist.get_world_size()
    ones = np.ones(2)
    in_manager(dist.all_gather_single, (np.zeros(whole), ones), (last(whole), ones), async_op=async_op)


def scatter_in_manager(last: Callable[[int], Any], async_op: bool) -> None:
    whole = np.ones(2 * dist.get_world_size())
    in_manager(dist.reduce_scatter_single, (np.zeros(2), whole), (last(2), whole), async_op=async_op)


BLOCKS = [reduce_list, gather_lists, reduce_in_manager, gather_in_manager, scatter_in_manager]


@transports
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bad", [read_only, lambda length: np.ones(length, np.float64).tolist()], ids=["read", "list"])
def test_a_rank_with_a_bad_array_calls_again(
    block: Callable[..., None], bad: Callable[[int], Any], async_op: bool, transport: str
) -> None:
    def call_until_it_is_good() -> None:
        if dist.get_rank() == 1:
            with pytest.raises((TypeError, ValueError)):
                block(bad, async_op)
        block(floats, async_op)
        total = np.full(1, 1.0 + dist.get_rank())
        dist.all_reduce(total)
        assert total[0] == 6

    run_ranks(call_until_it_is_good, 3, **placed(transport, 3), timeout=30)


@transports
def test_a_batch_with_a_bad_message_sends_none_of_them(transport: str) -> None:
    def send_and_receive() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        after, before = (rank + 1) % size, (rank - 1) % size
        into = np.zeros(3)
        for attempt, (place, array) in enumerate([(1, read_only(3)), (1, ""), (0, ""), (1, into)]):
            given = np.full(3, 10.0 * rank + attempt)
            ops = [dist.P2POp(dist.isend, given, after), dist.P2POp(dist.irecv, into, before)]
            ops[place].tensor = array
            fails = pytest.raises((TypeError, ValueError)) if array is not into else contextlib.nullcontext()
            with fails:
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
        assert (into == 10 * before + 3).all(), into

    run_ranks(send_and_receive, 3, **placed(transport, 3), timeout=30)


def test_a_batch_with_a_message_to_oneself_starts_none_of_them() -> None:
    def send() -> None:
        rank = dist.get_rank()
        ops = [dist.P2POp(dist.isend, np.full(1, 5.0), 1 - rank), dist.P2POp(dist.isend, np.ones(1), rank)]
        with pytest.raises(ValueError, match="should not be the same as the rank of the current process"):
            dist.batch_isend_irecv(ops)
        got = np.zeros(1)
        ops = [dist.P2POp(dist.isend, np.full(1, 7.0), 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert got[0] == 7

    run_ranks(send, 2, timeout=30)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("block", BLOCKS)
def test_alone_too_a_bad_array_is_refused(block: Callable[..., None]) -> None:
    with pytest.raises((TypeError, ValueError)):
        block(read_only, False)
    block(floats, False)


@pytest.mark.usefixtures("alone")
def test_alone_too_nothing_is_done_of_a_bad_block() -> None:
    doubled, output = np.ones(2), np.zeros(2)
    with pytest.raises((TypeError, ValueError)):
        dist.all_reduce_coalesced([doubled, read_only(2)], dist.ReduceOp.PREMUL_SUM(2.0))
    with pytest.raises((TypeError, ValueError)), dist._coalescing_manager():
        dist.all_gather_single(output, np.ones(2))
        dist.all_gather_single(output, np.ones(3))
    assert doubled.tolist() == [1, 1] and output.tolist() == [0, 0]
