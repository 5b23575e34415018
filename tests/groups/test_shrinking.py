"""shrink_group: after ranks were lost, the others make a smaller group at once, and go on with that."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import TRANSPORTS, allowance, on

import procgroup as dist
import two_hosts
from waiting import wait_until
from world import run, start

transports = pytest.mark.parametrize("transport", TRANSPORTS)


def train(victims: dict[int, int]) -> list[tuple[int, int, float]]:
    """Make 60 steps; each of ``victims`` kills itself in the step that is its value. Return what became of this rank.

    That is, for each loss: its rank and the number of ranks afterwards, and how many seconds the step was late.
    """
    me = dist.get_rank()
    became = []
    step, failed = 0, 0.0
    while step < 60:
        if victims.get(me) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        array = np.full(5000, 1.0)
        try:
            dist.all_reduce(array)
        except (dist.PeerLost, dist.PeerFailed):
            failed = time.monotonic()
            dist.shrink_group()
            continue
        assert (array == dist.get_world_size()).all()
        if failed:
            became.append((dist.get_rank(), dist.get_world_size(), time.monotonic() - failed))
            failed = 0.0
        step += 1
    return became


def lose(rank: int, size: int, victims: dict[int, int]) -> Any:
    dist.init_process_group(timeout=20)
    became = train(victims)
    pair = dist.new_group(sorted({0, dist.get_world_size() - 1}))
    total = np.ones(1)
    if pair is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(total, group=pair)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, f"was {rank}")
    dist.destroy_process_group()
    return became, names


@transports
@pytest.mark.parametrize(
    "victims", [{1: 5}, {0: 5}, {3: 5}, {0: 5, 3: 5}, {2: 5, 0: 20}, {1: 5, 2: 5, 3: 5}], ids=lambda one: str(one)
)
def test_the_others_go_on_without_the_lost_ranks_within_a_second(transport: str, victims: dict[int, int]) -> None:
    with start(lose, 4, args=(victims,), environment=on(transport)) as world:
        outcomes = world.wait(30)
    survivors = [rank for rank in range(4) if rank not in victims]
    for number, rank in enumerate(survivors):
        assert outcomes[rank].ok, outcomes[rank]
        became, names = outcomes[rank].value
        assert became[-1][:2] == (number, len(survivors))
        assert max(late for _, _, late in became) < allowance(1.0), became
        assert names == [f"was {one}" for one in survivors]
        assert outcomes[rank].output == ""


def fail_in_asynchronous_calls(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=20)
    dist.barrier()
    if rank == 2:
        dist.recv(np.zeros(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    works: list[Any] = [dist.all_reduce(np.ones(100_000), async_op=True) for _ in range(8)]
    receive: Any = dist.irecv(np.ones(1), 2)
    if rank == 1:  # rank 2 ends when both have issued their calls
        dist.send(np.zeros(1), 0, tag=1)
    else:
        dist.recv(np.zeros(1), 1, tag=1)
        dist.send(np.zeros(1), 2)
    dist_errors = 0
    old = dist.group.WORLD
    with pytest.raises(dist.DistError):
        works[0].wait()
    dist.shrink_group()
    started = time.monotonic()
    for work in [*works, receive]:
        with pytest.raises(dist.DistError):
            work.wait()
        dist_errors += 1
    assert time.monotonic() - started < allowance(1.0)
    with pytest.raises(dist.GroupDestroyed):
        dist.barrier(group=old)
    dist.barrier()
    return dist_errors


def test_calls_in_progress_end_and_the_old_group_can_be_used_no_more() -> None:
    with start(fail_in_asynchronous_calls, 3) as world:
        outcomes = world.wait(20)
    assert [outcome.value for outcome in outcomes[:2]] == [9, 9], outcomes


def exclude_one_that_lives(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=10)
    if rank == 1:
        with pytest.raises(ValueError, match=r"rank 1 is in ranks_to_exclude=\[1\]"):
            dist.shrink_group([1])
        with pytest.raises(dist.PeerFailed):
            dist.barrier()
        return None
    dist.shrink_group([1])
    total = np.full(1, float(rank))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total[0], dist.group.WORLD.group_name  # type: ignore[union-attr]


def test_ranks_that_live_can_be_left_out() -> None:
    assert run(exclude_one_that_lives, 4) == [(0, 3, 5.0, "0.1"), None, (1, 3, 5.0, "0.1"), (2, 3, 5.0, "0.1")]


def shrink_a_subgroup(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=10)
    odd: Any = dist.new_group([1, 2, 3])
    if rank == 2:
        dist.barrier(group=odd)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        return None
    dist.barrier(group=odd)
    with pytest.raises(dist.PeerLost) as lost:
        dist.all_reduce(np.ones(1), group=odd)
    smaller = dist.shrink_group(group=odd)
    total = np.full(1, float(rank))
    dist.all_reduce(total, group=smaller)
    return lost.value.global_peer, dist.get_process_group_ranks(smaller), smaller.rank(), total[0], dist.get_rank()


def test_a_group_that_is_not_the_default_one_keeps_the_global_ranks() -> None:
    with start(shrink_a_subgroup, 4) as world:
        outcomes = world.wait(20)
    assert outcomes[1].value == (2, [1, 3], 0, 4.0, 1)
    assert outcomes[3].value == (2, [1, 3], 1, 4.0, 3)


def come_late(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=10)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(60)
    with pytest.raises(dist.PeerLost):
        dist.barrier()
    with pytest.raises(dist.CollectiveTimeout) as late:
        dist.shrink_group(timeout=1.0)
    print("over", flush=True)
    return late.value.missing, str(late.value)


def test_a_rank_that_lives_and_does_not_come_is_named() -> None:
    with start(come_late, 3) as world:
        world.wait_for_output(0, "over")
        world.kill(1)
        missing, text = world.wait()[0].value
    assert missing == (1,)
    assert text.startswith("shrink_group #1 on group 0 (rank 0 of 3): not complete after ")
    assert "still waiting for rank 1: rank 1 is in come_late (test_shrinking.py:" in text, text


def name_ranks_of_the_smaller_group(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=10)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerLost):
        dist.barrier()
    dist.shrink_group()
    if rank == 2:
        raise RuntimeError("second failure")
    with pytest.raises((dist.PeerFailed, dist.PeerLost)) as failed:
        dist.barrier()
    return failed.value.peer, failed.value.global_peer


def test_errors_name_the_ranks_by_their_new_numbers() -> None:
    with start(name_ranks_of_the_smaller_group, 3) as world:
        assert world.wait(20)[1].value == (1, 1)


def shrink_alone(rank: int, size: int) -> Any:
    dist.init_process_group()
    dist.shrink_group()
    total = np.ones(3)
    dist.all_reduce(total)
    return dist.get_world_size(), total.tolist()


def test_a_group_of_one_rank_can_shrink_to_itself() -> None:
    assert run(shrink_alone, 1) == [(1, [1.0] * 3)]


def use_the_store(rank: int, size: int) -> Any:
    """Lose rank 0, in whose process the store is, and then the rank that hosts it after that."""
    dist.init_process_group(timeout=20)
    dist.barrier()
    found = []
    for victim in (0, 1):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.PeerLost):
            dist.barrier()
        world = dist.shrink_group()
        pair: Any = dist.new_group([0, dist.get_world_size() - 1])
        for group in (world, pair):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                group.get_group_store().set(str(group.rank()), str(rank))
                found.append(group.get_group_store().get(str(group.size() - 1)).decode())
        dist.barrier()
    dist.destroy_process_group()
    return found


def test_a_smaller_group_has_a_store_also_when_the_process_that_hosted_it_is_lost() -> None:
    with start(use_the_store, 4) as world:
        outcomes = world.wait(30)
    assert [outcome.value for outcome in outcomes[2:]] == [["3"] * 3, ["3"] * 4], outcomes


@pytest.mark.skipif(bool(two_hosts.lacks()), reason=two_hosts.lacks())
def test_it_has_one_between_hosts_too() -> None:
    with (
        two_hosts.joined() as hosts,
        start(use_the_store, 4, environments=two_hosts.environments(hosts, [0, 1, 0, 1])) as world,
    ):
        outcomes = world.wait(30)
    assert [outcome.value for outcome in outcomes[2:]] == [["3"] * 3, ["3"] * 4], outcomes


def issue_after_a_failure(rank: int, size: int) -> None:
    dist.init_process_group(timeout=20)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work: Any = dist.all_reduce(np.ones(1), async_op=True)
    wait_until(work.is_completed)
    with pytest.raises(dist.PeerLost):
        dist.all_reduce(np.ones(1), async_op=True)
    with pytest.raises(dist.GroupBroken):
        dist.barrier()
    with pytest.raises(dist.PeerLost):
        work.wait()
    dist.shrink_group()
    dist.barrier()


def test_the_first_error_is_that_of_the_lost_rank_also_where_no_asynchronous_call_was_awaited() -> None:
    with start(issue_after_a_failure, 3) as world:
        outcomes = world.wait(20)
    assert outcomes[0].ok and outcomes[2].ok, outcomes
