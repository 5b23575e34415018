"""P2POp and batch_isend_irecv: what they refuse; a batch moves every message wherever it stands in the list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.testing import run_ranks
from world import run


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_before_init_there_is_no_group_to_send_in() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.P2POp(dist.isend, np.zeros(1), 0)


@pytest.mark.usefixtures("alone")
def test_an_op_keeps_what_it_was_given() -> None:
    array = np.zeros((2, 3), np.float32)
    op = dist.P2POp(dist.irecv, array, group_peer=0, tag=5)
    assert (op.op, op.peer, op.group_peer, op.tag) == (dist.irecv, 0, 0, 5)
    assert op.tensor is array and op.group is dist.group.WORLD
    assert repr(op) == "P2POp(irecv pg=0, group_src=0, group_dst=0, (2, 3), float32)"
    assert repr(dist.P2POp(dist.isend, memoryview(b"ab"), 0)).startswith("P2POp(isend pg=0")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((dist.send, np.zeros(1), 0), ValueError, "Invalid ``op``"),
        ((dist.all_reduce, np.zeros(1), 0), ValueError, "Invalid ``op``"),
        ((dist.isend, [1, 2], 0), TypeError, "Invalid function argument. Expected parameter `tensor`"),
        ((dist.isend, None, 0), TypeError, "NoneType"),
        ((dist.isend, np.zeros(1)), ValueError, "Must specify global_rank or group_rank"),
        ((dist.isend, np.zeros(1), 0, None, 0, 0), ValueError, "Can't specify both group_rank and global_rank"),
        ((dist.isend, np.zeros(1), 1), ValueError, "Global rank 1 is not part of group 0"),
        ((dist.isend, np.zeros(1), None, None, 0, 1), ValueError, "Group rank 1 is not part of group 0"),
        ((dist.isend, np.zeros(1), 0, None, -1), ValueError, "`tag`"),
        ((dist.isend, np.zeros(1), 0, None, "a"), TypeError, "`tag`"),
        ((dist.isend, np.zeros(1), 0, dist.GroupMember.NON_GROUP_MEMBER), ValueError, "Invalid ``group``"),
    ],
)
def test_an_op_is_checked_when_it_is_made(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        dist.P2POp(*arguments)
    assert text in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_a_batch_is_a_list_of_ops_that_is_not_empty() -> None:
    op = dist.P2POp(dist.isend, np.zeros(1), 0)
    for wrong in ((op,), [op, None], op, "ab"):
        with pytest.raises(ValueError, match="Each op is expected to be of type"):
            dist.batch_isend_irecv(wrong)  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        dist.batch_isend_irecv([])


@pytest.mark.usefixtures("alone")
def test_all_ops_of_a_batch_are_of_one_group() -> None:
    ops = [dist.P2POp(dist.isend, np.zeros(1), 0) for _ in range(2)]
    ops[1].group = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="All ops need to use the same group. Make one batch"):
        dist.batch_isend_irecv(ops)


def test_the_works_of_a_batch_are_in_the_order_of_its_list() -> None:
    def exchange() -> list[str]:
        other = 1 - dist.get_rank()
        order = [dist.isend, dist.irecv, dist.irecv, dist.isend]
        works = dist.batch_isend_irecv([dist.P2POp(op, np.zeros(1), other) for op in order])
        for work in works:
            work.wait()
        return [repr(work).split()[1] for work in works]  # "<Work send on group 0 ..."

    assert run_ranks(exchange, 2) == [["send", "recv", "recv", "send"]] * 2


def wait_for_all(ops: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(ops):
        assert work.wait()


def batches(rank: int, size: int) -> None:
    """Rings of batches of every length, sends first and receives first; then ten thousand ops at once."""
    dist.init_process_group(timeout=25)
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 1000, 100_003):
        for turn in range(2):
            got = [np.zeros(count, np.int64) for _ in range(3)]
            ops = [dist.P2POp(dist.isend, np.full(count, 10 * rank + number), after) for number in range(3)]
            ops += [dist.P2POp(dist.irecv, array, group_peer=before) for array in got]
            wait_for_all(ops[turn * 3 :] + ops[: turn * 3])
            assert all((array == 10 * before + number).all() for number, array in enumerate(got)), (count, turn)
    many = [np.zeros(1, np.int64) for _ in range(5000)]
    ops = [dist.P2POp(dist.isend, np.array([number]), after, tag=number % 3) for number in range(5000)]
    wait_for_all(ops + [dist.P2POp(dist.irecv, array, before, tag=n % 3) for n, array in enumerate(many)])
    assert [int(array[0]) for array in many] == list(range(5000))
    oneself = dist.P2POp(dist.irecv, np.zeros(1), rank)
    with pytest.raises(ValueError, match="Invalid source rank: source rank should not be the same"):
        dist.batch_isend_irecv([oneself])
    with pytest.raises(ValueError, match="Invalid destination rank: destination rank should not be the same"):
        dist.isend(np.zeros(1), rank)
    work: Any = dist.batch_isend_irecv([dist.P2POp(dist.irecv, got[0], before, tag=9)])[0]
    dist.send(np.full(100_003, rank), after, tag=9)
    assert work.wait() and work.source_rank() == before


@pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])
@pytest.mark.parametrize("size", [2, 3])
def test_batches_go_round_in_rings_whatever_their_order(transport: str, size: int) -> None:
    run(batches, size, timeout=50, environment={"PROCGROUP_TRANSPORT": transport})
