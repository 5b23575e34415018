"""Groups that are not made, that end, and whose members end: which ranks are notified, and that the others go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.testing import run_ranks
from world import placed, start

transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


def error_of_making(ranks: list[int], timeout: float = 30) -> Any:
    with pytest.raises(dist.OperationError) as caught:
        dist.new_group(ranks, timeout=timeout)
    return caught.value


def make_groups_that_differ() -> None:
    rank = dist.get_rank()
    error = error_of_making([0, 1] if rank == 0 else [0, 1, 2])
    assert (error.op, error.rank, error.size) == ("new_group", rank, 3)
    if rank == 2:  # it waits for rank 0, but rank 0 makes nothing with it
        assert isinstance(error, dist.PeerFailed)
        assert "rank 0 calls new_group([0, 1])" in error.reason
    else:
        assert isinstance(error, dist.CollectiveMismatch)
        calls = {caller: call.partition(" at test_group_failures.py:") for caller, call in error.calls.items()}
        assert {caller: call for caller, (call, _, _) in calls.items()} == {
            0: "new_group([0, 1])",
            1: "new_group([0, 1, 2])",
        }
        assert all(line.isdigit() for _, _, line in calls.values()), error.calls
    dist.barrier()
    array = np.array([1])
    dist.all_reduce(array, group=dist.new_group([2, 1, 0]))  # type: ignore[arg-type]
    assert array[0] == 3


@transports
def test_lists_that_differ_are_reported_on_every_rank_and_the_next_group_works(transport: str) -> None:
    run_ranks(make_groups_that_differ, 3, **placed(transport, 3))


def wait_for_a_rank_that_never_comes(gave_up: list[threading.Event]) -> None:
    rank = dist.get_rank()
    dist.barrier()
    if rank == 2:
        assert all(event.wait(60) for event in gave_up)
        error = error_of_making([0, 1, 2])  # too late: notified at once
        assert isinstance(error, dist.PeerFailed)
        assert "its time limit of 1 s passed while it waited for rank" in error.reason
    else:
        error = error_of_making([0, 1, 2], timeout=1)
        assert "new_group #1 on group 0" in str(error)
        if isinstance(error, dist.CollectiveTimeout):
            assert (error.missing[-1], error.seconds) == (2, 1)
        else:  # where the machine is so slow that the other rank gave up on this one too
            assert isinstance(error, dist.PeerFailed) and "time limit of 1 s passed" in error.reason
        gave_up[rank].set()
    group = dist.new_group([0, 1, 2])
    array = np.array([rank])
    dist.all_reduce(array, group=group)  # type: ignore[arg-type]
    assert array[0] == 3


@transports
def test_a_rank_that_never_comes_is_named_at_the_timeout(transport: str) -> None:
    run_ranks(wait_for_a_rank_that_never_comes, 3, [threading.Event() for _ in range(2)], **placed(transport, 3))


def leave_one_group() -> None:
    rank = dist.get_rank()
    first, second = dist.new_group(), dist.new_group()
    array = np.ones(1000)
    dist.all_reduce(array, group=first)  # type: ignore[arg-type]
    if rank == 0:
        dist.destroy_process_group(first)  # type: ignore[arg-type]
        dist.destroy_process_group(first)  # type: ignore[arg-type]
        with pytest.raises(dist.GroupDestroyed):
            dist.all_reduce(array, group=first)  # type: ignore[arg-type]
    else:
        with pytest.raises(dist.PeerLost, match="it left the group before this call") as caught:
            dist.all_reduce(array, group=first)  # type: ignore[arg-type]
        assert caught.value.peer == 0
    array = np.ones(1000)
    dist.all_reduce(array, group=second)  # type: ignore[arg-type]
    dist.all_reduce(array)
    assert (array == 4).all()
    assert dist.is_initialized()


@transports
def test_a_group_that_a_rank_has_left_says_so_and_the_others_go_on(transport: str) -> None:
    run_ranks(leave_one_group, 2, **placed(transport, 2))


def abort_one_group(waiting: threading.Event) -> None:
    rank = dist.get_rank()
    group = dist.new_group()
    assert not isinstance(group, int)
    if rank == 1:
        work: Any = dist.all_reduce(np.ones(5), group=group, async_op=True)
        waiting.set()
        with pytest.raises(dist.DistError, match="failed|aborted"):
            work.wait()
        with pytest.raises(dist.GroupBroken):
            dist.barrier(group=group)
    else:
        assert waiting.wait(60)
        group.abort()
        group.abort()
        with pytest.raises(dist.GroupBroken, match="aborted"):
            dist.barrier(group=group)
    dist.barrier()


@transports
def test_aborting_a_group_ends_it_on_all_members_and_nothing_else(transport: str) -> None:
    run_ranks(abort_one_group, 2, threading.Event(), **placed(transport, 2))


def abort_the_default_group(aborted: threading.Event) -> None:
    """Abort it while no call is in progress."""
    if dist.get_rank() == 0:
        dist.group.WORLD.abort()
        aborted.set()
        with pytest.raises(dist.GroupBroken, match="aborted"):
            dist.barrier()
    else:
        assert aborted.wait(60)
        with pytest.raises(dist.PeerFailed, match="rank 0 failed: its default group was aborted"):
            dist.barrier(timeout=timedelta(seconds=5))


@transports
def test_aborting_the_default_group_ends_it_for_later_calls(transport: str) -> None:
    run_ranks(abort_the_default_group, 2, threading.Event(), **placed(transport, 2))


def receive_from_one_that_aborts_and_leaves(from_any: bool) -> None:
    """Nothing holds the ranks together: the other one may come after this one has left, or leave at once."""
    rank = dist.get_rank()
    work = dist.irecv(np.zeros(1), src=None if from_any else 1 - rank)
    assert work is not None
    if rank == 0:
        dist.group.WORLD.abort()
        with pytest.raises(dist.GroupBroken, match="aborted"):
            work.wait(20)
    else:
        with pytest.raises(dist.PeerFailed, match="rank 0 failed: its default group was aborted"):
            work.wait(20)


@transports
@pytest.mark.parametrize("from_any", [True, False], ids=["from any rank", "from one rank"])
def test_each_rank_is_told_of_an_abort_whenever_it_calls(from_any: bool, transport: str) -> None:
    for _ in range(20):
        run_ranks(receive_from_one_that_aborts_and_leaves, 2, from_any, **placed(transport, 2))


def call_in_opposite_orders(length: int) -> None:
    """Each rank issues calls on two groups in its own order, and waits for the last first."""
    rank = dist.get_rank()
    groups: list[Any] = [dist.new_group(), dist.new_group()]
    for _ in range(5):
        arrays = [np.full(length, rank + 1.0) for _ in groups]
        order = [0, 1] if rank == 0 else [1, 0]
        works: list[Any] = [dist.all_reduce(arrays[one], group=groups[one], async_op=True) for one in order]
        for work in reversed(works):
            work.wait()
        assert all((array == 3).all() for array in arrays)


@transports
@pytest.mark.parametrize("length", [3, 500_000])
def test_orders_that_cross_do_not_deadlock(transport: str, length: int) -> None:
    run_ranks(call_in_opposite_orders, 2, length, **placed(transport, 2))


def call_from_two_threads() -> None:
    """A thread for each group; blocking calls, of which one group's never wait for the other's."""
    groups: list[Any] = [dist.new_group(), dist.new_group()]
    failed: list[BaseException] = []

    def call(group: Any, turns: int, length: int) -> None:
        try:
            for _ in range(turns):
                array = np.ones(length)
                group.all_reduce(array)
                assert (array == 2).all()
        except BaseException as error:
            failed.append(error)

    rank = dist.get_rank()
    threads = [
        threading.Thread(target=call, args=(groups[one], turns, length))
        for one, turns, length in [(0, 40, 10), (1, 10, 50_000)][:: 1 if rank else -1]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@transports
def test_threads_use_a_group_each_side_by_side(transport: str) -> None:
    run_ranks(call_from_two_threads, 2, **placed(transport, 2))


def lose_a_member(rank: int, size: int) -> str:
    """Rank 2 is killed: its groups break, those without it go on; a forked child may use none."""
    dist.init_process_group(timeout=40)
    with_it: Any = dist.new_group([1, 2])
    without: Any = dist.new_group([0, 1])
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    text = ""
    if rank == 1:
        with pytest.raises(dist.PeerLost) as caught:
            dist.all_reduce(np.ones(10), group=with_it)
        assert caught.value.peer == 1  # the group rank
        text = str(caught.value)
        with pytest.raises(dist.OperationError):
            dist.barrier(group=with_it)
    array = np.ones(100_000)
    dist.all_reduce(array, group=without)
    assert (array == 2).all()
    again: Any = dist.new_group([0, 1])
    dist.all_reduce(array, group=again)
    assert (array == 4).all()
    error = error_of_making([0, 1, 2])
    assert isinstance(error, dist.PeerLost) and error.peer == 2, error
    if rank == 0 and (pid := os.fork()) == 0:
        try:
            dist.all_reduce(array, group=without)
        except dist.ForkedProcessError:
            os._exit(17)
        os._exit(1)
    if rank == 0:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
    dist.barrier(group=again)
    return text  # nothing is destroyed: leaving at exit does that


@transports
def test_a_lost_member_breaks_the_groups_that_it_is_in(transport: str) -> None:
    with start(lose_a_member, 3, environment={"PROCGROUP_TRANSPORT": transport}) as world:
        outcomes = world.wait(60)
    for rank in (0, 1):
        assert outcomes[rank].ok, f"rank {rank}:\n{outcomes[rank].output}{outcomes[rank].traceback}"
        assert outcomes[rank].output == ""
    assert "lost rank 2 (rank 1 of group 1) (pid" in outcomes[1].value


def complete_and_leave(rank: int, size: int, others_are_in_the_call: str) -> int:
    dist.init_process_group(timeout=30)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier()
    number = np.array([rank])
    if rank == 1:  # the leader of its host
        work = dist.all_reduce(number, group=group, async_op=True)
        assert work is not None
        work.wait()
    elif rank == 3:
        dist.all_reduce(number, group=group)
    else:
        while not os.path.exists(others_are_in_the_call):
            time.sleep(0.01)
        dist.all_reduce(number, group=group)
        dist.destroy_process_group(group)
        print("has left", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(number[0])


def test_a_rank_of_another_host_may_leave_before_its_announcement_has_come_by_its_leader(tmp_path: Path) -> None:
    in_the_call = tmp_path / "in the call"
    spanning = {"PROCGROUP_TRANSPORT": "spanning"}
    with start(complete_and_leave, 4, args=(str(in_the_call),), environment=spanning) as ranks:
        for rank in (1, 3):
            ranks.wait_for_call(rank, "all_reduce")
        ranks.wait_until_idle()  # rank 1 has sent the announcements of its host
        ranks.kill(1, signal.SIGSTOP)
        in_the_call.touch()
        for rank in (0, 2):
            ranks.wait_for_output(rank, "has left")
        ranks.wait_until_idle()  # rank 3 knows that they have left, and not yet that they have completed the call
        ranks.kill(1, signal.SIGCONT)
        outcomes = ranks.wait()
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(6, None)] * 4


def time_out(rank: int, size: int, first: int, leader_is_stopped: str) -> tuple[str, tuple[int, ...], str]:
    dist.init_process_group(timeout=30)
    dist.barrier()
    print("is ready", flush=True)
    while rank in (2, 3) and not os.path.exists(leader_is_stopped):
        time.sleep(0.01)
    with pytest.raises((dist.CollectiveTimeout, dist.PeerFailed)) as raised:
        dist.all_reduce(np.ones(1), timeout=8 if rank == first == 0 else 3 if rank == first else 30)
    print("has failed", flush=True)
    error: Any = raised.value
    return type(error).__name__, error.missing, str(error)


@pytest.mark.parametrize(("first", "missing", "relays"), [(0, 3, "rank 1"), (3, 2, "ranks 0, 1")])
def test_a_timeout_names_the_leaders_that_may_hold_back_what_a_missing_rank_announced(
    first: int, missing: int, relays: str, tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    with start(time_out, 4, args=(first, str(stopped)), environment={"PROCGROUP_TRANSPORT": "spanning"}) as ranks:
        for rank in range(4):
            ranks.wait_for_output(rank, "is ready")
        for rank in (0, 1):
            ranks.wait_for_call(rank, "all_reduce")
        time.sleep(1.5)  # the leaders have sent each other their own: they wait a while for the ranks of their hosts
        ranks.kill(1, signal.SIGSTOP)
        stopped.touch()
        for rank in (0, 2, 3):
            ranks.wait_for_output(rank, "has failed")
        ranks.kill(1, signal.SIGKILL)
        ends = {outcome.rank: outcome.value for outcome in ranks.wait() if outcome.rank != 1}
    awaited = f"rank {missing}, or for {relays} to relay announcements"
    for rank, (kind, missed, text) in ends.items():
        assert (kind, missed[0]) == ("CollectiveTimeout" if rank == first else "PeerFailed", missing), text
        assert (f"waiting for {awaited}: " if rank == first else f"waited for {awaited}") in text, text
    assert "; rank 1 is " in ends[first][2]


def leave_as_leader(rank: int, size: int) -> Any:
    """Rank 0, which relays for its host, leaves before a call is complete; return when, and the others' errors."""
    dist.init_process_group(timeout=30)
    dist.barrier()
    if rank == 1:
        time.sleep(60)
    work = dist.all_reduce(np.ones(4), async_op=True)
    assert work is not None
    if rank == 0:
        dist.destroy_process_group(timeout=0.2)
        return time.monotonic()
    with pytest.raises(dist.PeerLost) as raised:
        work.wait()
    print("over", flush=True)
    return time.monotonic(), raised.value.peer, str(raised.value)


def test_a_rank_is_told_that_the_leader_of_its_host_has_left_and_relays_no_more() -> None:
    with start(leave_as_leader, 3, environment={"PROCGROUP_TRANSPORT": "spanning"}) as world:
        world.wait_for_output(2, "over")
        world.kill(1)
        outcomes = world.wait()
    assert outcomes[0].ok and outcomes[2].ok, outcomes
    moment, peer, text = outcomes[2].value
    assert peer == 0 and "it left the group before this call" in text
    assert moment - outcomes[0].value < 10, "long before the deadline of 30 s"
