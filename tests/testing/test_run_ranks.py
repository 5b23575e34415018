"""Ranks as threads: results, real data, errors of all ranks, deadlines."""

from __future__ import annotations

import gc
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.api import exit_hooks
from procgroup.groups.group import ProcessGroup
from procgroup.testing import RanksFailed, RanksTimeout, connected_groups, ranks, run_ranks
from procgroup.testing.ranks import _ThreadRank, stacks_of
from world import placed

RANKS = (1, 2, 3, 4, 7)
transports = pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])


def total_of_ranks(count: int) -> list[float]:
    array = np.full(count, dist.get_rank() + 1.0)
    dist.all_reduce(array)
    return array.tolist()


@transports
@pytest.mark.parametrize("size", RANKS)
def test_data_moves(size: int, transport: str) -> None:
    counts = (0, 1, 13, 100_003)
    totals = run_ranks(lambda: [total_of_ranks(count) for count in counts], size, **placed(transport, size))
    assert totals == [[[size * (size + 1) / 2] * count for count in counts]] * size


def test_each_rank_has_a_default_group_of_its_own() -> None:
    def look() -> tuple[int, int, bool, str | None]:
        assert dist.group.WORLD is not None
        return dist.get_rank(), dist.get_world_size(), dist.is_initialized(), dist.group.WORLD.group_name

    assert run_ranks(look, 3) == [(rank, 3, True, "0") for rank in range(3)]
    assert not dist.is_initialized()


@transports
def test_messages_go_from_thread_to_thread(transport: str) -> None:
    def pass_on() -> int:
        rank, size = dist.get_rank(), dist.get_world_size()
        token = np.array([rank])
        received = np.empty_like(token)
        work = dist.isend(token, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        assert work is not None
        work.wait()
        return int(received[0])

    assert run_ranks(pass_on, 4, **placed(transport, 4)) == [3, 0, 1, 2]


@transports
def test_a_world_that_has_ended_leaves_no_memory_and_no_descriptor_open(transport: str) -> None:
    def use() -> None:
        total_of_ranks(3)
        work = dist.all_reduce(np.ones(3), async_op=True)
        assert work is not None
        work.get_future().wait()

    def open_descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    run_ranks(use, 3, **placed(transport, 3))  # what the process keeps for good is open now
    before = open_descriptors()
    for _ in range(3):
        run_ranks(use, 3, **placed(transport, 3))
    # Threads of the last world may end a moment after it.
    deadline = time.monotonic() + 20
    while open_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_descriptors() <= before


def test_the_transport_is_what_was_asked_for() -> None:
    def transport() -> str:
        assert dist.group.WORLD is not None
        return dist.group.WORLD.transport

    assert run_ranks(transport, 2, transport="shm") == ["shared memory"] * 2
    assert run_ranks(transport, 2, transport="tcp") == ["tcp"] * 2
    with pytest.raises(ValueError, match="`transport` to be one of auto, shm, tcp, got 'pigeons'"):
        run_ranks(transport, 2, transport="pigeons")


def test_many_worlds_follow_each_other_and_leave_no_thread_behind() -> None:
    before = set(threading.enumerate())  # of those, some may end meanwhile: what other tests have left
    for _ in range(10):
        run_ranks(total_of_ranks, 4, 5)
    assert not set(threading.enumerate()) - before


def test_a_rank_may_destroy_its_group() -> None:
    def leave() -> bool:
        dist.barrier()
        dist.destroy_process_group()
        return dist.is_initialized()

    assert run_ranks(leave, 3) == [False] * 3


@transports
def test_errors_of_all_ranks_are_reported_together_causes_first(transport: str) -> None:
    def fail() -> None:
        if dist.get_rank() in (1, 3):
            raise KeyError(f"of rank {dist.get_rank()}")
        dist.barrier()

    with pytest.raises(RanksFailed, match="ranks 0, 1, 2, 3 of 4 failed; rank 1: KeyError: 'of rank 1'") as caught:
        run_ranks(fail, 4, **placed(transport, 4))
    assert list(caught.value.errors) == [1, 3, 0, 2]
    assert isinstance(caught.value.errors[1], KeyError)
    assert isinstance(caught.value.errors[2], (dist.PeerLost, dist.PeerFailed))
    assert caught.value.errors[3].__notes__ == ["(raised on rank 3 of 4)"]


def test_a_mismatch_is_found_between_threads() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(lambda: dist.all_reduce(np.ones(1 + dist.get_rank())), 2)
    assert [type(error) for error in caught.value.errors.values()] == [dist.CollectiveMismatch] * 2


def test_the_deadline_ends_calls() -> None:
    def meet_without_one() -> None:
        if dist.get_rank() == 0:
            dist.recv(np.ones(1), src=2)
        elif dist.get_rank() == 1:
            dist.barrier()
        else:
            while True:
                time.sleep(0.001)

    with pytest.raises(RanksTimeout, match="ranks 0, 1, 2 of 3 still running after 0.3 s") as caught:
        run_ranks(meet_without_one, 3, timeout=timedelta(seconds=0.3))
    assert caught.value.running == (0, 1, 2)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_stack_is_shown_from_the_ranks_function_on() -> None:
    gate = threading.Event()
    entered = threading.Event()

    def wait_at_the_gate() -> None:
        entered.set()
        gate.wait()

    with connected_groups(1) as groups:
        thread = _ThreadRank(groups[0], wait_at_the_gate, threading.Semaphore(0))
        thread.start()
        entered.wait()
        stacks = stacks_of({5: thread})
        gate.set()
        thread.join()
    assert stacks.startswith("\n--- rank 5 is in\n  File ")
    assert "in wait_at_the_gate" in stacks.splitlines()[2]


def test_the_deadline_ends_python_code_too() -> None:
    counted = []

    def count() -> None:
        while True:
            counted.append(dist.get_rank())
            time.sleep(0.001)

    with pytest.raises(RanksTimeout, match="rank 0 of 1 still running after 0.1 s"):
        run_ranks(count, 1, timeout=0.1)
    after = len(counted)
    time.sleep(0.05)
    assert len(counted) == after


def test_a_rank_may_make_groups_at_any_line_of_the_end_of_another() -> None:
    made: list[ProcessGroup] = []

    def make_a_group_at_each_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            world, child = (ranks.make_groups(1, 30.0, None)[0] for _ in range(2))
            made.append(world)
            exit_hooks.adopt(child, world)
        return make_a_group_at_each_line if frame.f_globals is vars(exit_hooks) else None

    leaving, its_child = (ranks.make_groups(1, 30.0, None)[0] for _ in range(2))
    exit_hooks.adopt(its_child, leaving)
    former = sys.gettrace()
    sys.settrace(make_a_group_at_each_line)
    try:
        exit_hooks.leave(leaving)
    finally:
        sys.settrace(former)
        for world in made:
            exit_hooks.leave(world)
    assert len(made) > 10
    assert not {leaving, its_child} & set(exit_hooks._alive)


def test_the_deadline_is_one_for_all_ranks_and_does_not_begin_again_when_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    may_end = [threading.Event() for _ in range(3)]
    waits: list[float] = []

    class EndsEvery20Seconds(threading.Semaphore):
        """Counts the ranks that have ended. In made-up time, which passes here only, one ends every 20 s."""

        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            nonlocal now
            assert timeout is not None
            waits.append(timeout)
            now += min(timeout, 20.0)
            if timeout < 20.0:
                return False
            may_end[len(waits) - 1].set()
            return super().acquire()

    def wait_until_it_may_end() -> None:
        while not may_end[dist.get_rank()].wait(0.01):  # a thread that waits for long cannot be stopped
            pass

    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ranks, "threading", SimpleNamespace(Semaphore=EndsEvery20Seconds))
    with suppress(RanksTimeout):
        run_ranks(wait_until_it_may_end, 3, timeout=50)
    assert waits == [50, 30, 10], "of 50 s these were left as one rank after another was awaited"


def test_what_ranks_had_raised_at_the_deadline_is_shown() -> None:
    def fail_or_sleep() -> None:
        if dist.get_rank() == 0:
            raise ValueError("of rank 0")
        while True:
            time.sleep(0.001)

    with pytest.raises(RanksTimeout, match="rank 0 raised ValueError") as caught:
        run_ranks(fail_or_sleep, 2, timeout=1)
    assert caught.value.running == (1,)
    assert isinstance(caught.value.errors[0], ValueError)


@pytest.mark.parametrize("special", [SystemExit(3), KeyboardInterrupt(), pytest.skip.Exception("not today")])
def test_what_is_no_failure_is_raised_as_it_is(special: BaseException) -> None:
    def end() -> None:
        if dist.get_rank() == 1:
            raise special
        dist.barrier()

    with pytest.raises(type(special)) as caught:
        run_ranks(end, 2)
    assert caught.value is special


def test_a_world_has_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="`size` to be at least 1, got 0"):
        run_ranks(dist.get_rank, 0)


@transports
def test_one_thread_can_play_all_ranks(transport: str) -> None:
    with connected_groups(3, **placed(transport, 3)) as groups:
        arrays = [np.array([group.rank()]) for group in groups]
        works = [group.all_reduce(array, async_op=True) for group, array in zip(groups, arrays, strict=True)]
        assert [work is not None and work.wait() for work in works] == [True] * 3
        assert [int(array[0]) for array in arrays] == [3, 3, 3]
    with pytest.raises(dist.GroupDestroyed):
        groups[0].barrier()


def test_calls_of_connected_groups_have_the_timeout_that_was_given() -> None:
    with connected_groups(2, timeout=0.1) as groups, pytest.raises(dist.CollectiveTimeout) as caught:
        groups[0].barrier()
    assert caught.value.missing == (1,)
