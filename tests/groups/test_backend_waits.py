"""A timeout names the ranks that a backend's transfer waits for; a transfer that waits without yielding is refused."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from typing import Any, ClassVar

import numpy as np
import pytest
from groups.toy_backend import StoreBackend

import procgroup as dist
from procgroup.backends import registry
from procgroup.errors import CollectiveTimeout, DistBackendError, GroupBroken, PeerFailed
from procgroup.groups.backend import Call
from procgroup.testing import run_ranks
from waiting import MeetingOfThreads
from world import start, wait_until

is_async = pytest.mark.parametrize("is_async", [False, True])
HOSTS = pytest.mark.parametrize("hosts", [None, [0, 0, 1]], ids=["one host", "two hosts"])


class Yielding(StoreBackend):
    """Yields for ever: on rank 1 nothing that names a rank, on the others what ``awaited`` says."""

    awaited: Any = None

    def move(self, call: Call) -> Iterator[Any]:
        while True:
            yield None if self.rank == 1 else self.awaited


class YieldsOne(Yielding):
    awaited = 1


class YieldsTwo(Yielding):
    awaited = (1, 2)


class YieldsNoRank(Yielding):
    awaited = 3


class YieldsNext(StoreBackend):
    """Every rank waits for the next one, and the last one for none."""

    def move(self, call: Call) -> Iterator[Any]:
        while True:
            yield self.rank + 1 if self.rank < 2 else None


class YieldsPrevious(StoreBackend):
    """Every rank waits for the one before, and rank 0, which looks at the others when they have failed, for none."""

    others_have_failed = threading.Event()

    def move(self, call: Call) -> Iterator[Any]:
        if self.rank == 0:
            self.others_have_failed.wait(20)
        while True:
            yield self.rank - 1 if self.rank > 0 else None


class Waiting(StoreBackend):
    """Waits on rank 1 in a way that is not allowed there, which the count of the call chooses."""

    contexts: ClassVar[dict[int, Context]] = {}
    """Of the ranks, which are threads here: the progress thread may call ``move``, and has no default group."""

    def move(self, call: Call) -> Iterator[int]:
        if self.rank == 1 and call.dtype == "float32":
            self.contexts[self.rank].run(WAITS[list(WAITS)[call.outputs[0].size // 4 - 1]])
        return super().move(call)


def stop() -> None:
    """Stop this process before this thread goes on: a signal to the process is another thread's to take, and late."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class StopsRank1(Yielding):
    """Rank 1 is stopped in its transfer."""

    def move(self, call: Call) -> Iterator[Any]:
        if self.rank == 1 and call.op == "all_reduce":
            stop()
        yield from super().move(call)


class StopsRank4(StoreBackend):
    """Rank 4 is stopped in its transfer; the others complete theirs."""

    def move(self, call: Call) -> Iterator[Any]:
        if self.rank == 4:
            stop()
        return iter(())


def wait_for_a_call() -> None:
    work = dist.all_reduce(np.ones(1), async_op=True)
    assert work is not None
    work.wait()


WAITS: dict[str, Callable[[], object]] = {
    "destroy_process_group": dist.destroy_process_group,
    "the making of a group": dist.new_group,
    "all_reduce": lambda: dist.all_reduce(np.ones(1)),
    "send": lambda: dist.send(np.ones(1), 0),
    "wait": wait_for_a_call,
}

for made in (Yielding, YieldsOne, YieldsTwo, YieldsNoRank, YieldsNext, YieldsPrevious, Waiting, StopsRank1, StopsRank4):
    if not registry.is_backend_available(made.__name__.lower()):
        dist.Backend.register_backend(made.__name__.lower(), made)


def reduce(count: int, is_async: bool, timeout: float | None = None) -> None:
    work = dist.all_reduce(np.ones(count, np.float32), async_op=is_async, timeout=timeout)
    if work is not None:
        work.wait()


def pass_the_deadline(is_async: bool, meeting: MeetingOfThreads) -> tuple[type, tuple[int, ...], str]:
    meeting.meet()
    if dist.get_rank() == 0:
        meeting.wait_for_calls_of(1, 2)
    with pytest.raises((CollectiveTimeout, PeerFailed)) as raised:
        reduce(4, is_async, 0.5 if dist.get_rank() == 0 else 20)
    meeting.meet()  # no rank leaves before the others have been notified
    return type(raised.value), raised.value.missing, str(raised.value)


@HOSTS
@is_async
@pytest.mark.parametrize(("backend", "missing"), [("yieldsone", (1,)), ("yieldstwo", (1, 2)), ("yielding", ())])
def test_a_timeout_names_the_ranks_that_the_transfer_waits_for(
    backend: str, missing: tuple[int, ...], is_async: bool, hosts: list[int] | None
) -> None:
    ends = run_ranks(pass_the_deadline, 3, is_async, MeetingOfThreads(3), hosts=hosts, backend=backend)
    names = {(): "its backend, which does not name the ranks that it waits for", (1,): "rank 1", (1, 2): "ranks 1, 2"}
    assert [kind for kind, _, _ in ends] == [CollectiveTimeout, PeerFailed, PeerFailed]
    for kind, awaited, text in ends:
        assert awaited == missing
        said = "still waiting for" if kind is CollectiveTimeout else "while it waited for"
        assert f"{said} {names[missing]}" in text
    assert not missing or "rank 1 is in all_reduce(SUM) of 4 float32 by another backend" in ends[0][2]


def reduce_beside_a_stopped_rank(rank: int, size: int, is_async: bool) -> None:
    dist.init_process_group("stopsrank1", timeout=60)
    dist.barrier()
    reduce(4, is_async, 1.0 if rank == 0 else 20)


@is_async
def test_a_stopped_rank_is_named_although_the_transfer_names_none(is_async: bool) -> None:
    with start(reduce_beside_a_stopped_rank, 3, args=(is_async,)) as world:
        world.wait_for_end([0, 2])
        world.kill(1)
        outcomes = world.wait(20)
    timeout, passed_on = outcomes[0].error, outcomes[2].error
    assert isinstance(timeout, CollectiveTimeout) and timeout.missing == (1,), outcomes[0]
    assert "still waiting for rank 1: rank 1 is stopped (SIGSTOP), and was in all_reduce" in str(timeout)
    assert isinstance(passed_on, PeerFailed) and passed_on.missing == (1,), outcomes[2]


def reduce_between_hosts(rank: int, size: int, is_async: bool) -> None:
    dist.init_process_group("stopsrank4", timeout=60)
    dist.barrier()
    reduce(4, is_async, 1.0 if rank == 2 else 20)


@is_async
def test_a_stopped_rank_is_named_where_its_confirmation_is_awaited_through_others(is_async: bool) -> None:
    # Ranks 0, 2 and 4 are on one host. Rank 2 waits for rank 0, and rank 0 for rank 4.
    with start(reduce_between_hosts, 5, args=(is_async,), environment={"PROCGROUP_TRANSPORT": "spanning"}) as world:
        world.wait_for_end(range(4))
        world.kill(4)
        outcomes = world.wait(20)
    timeout = outcomes[2].error
    assert isinstance(timeout, CollectiveTimeout) and timeout.missing == (4,), outcomes[2]
    assert "rank 4 is stopped (SIGSTOP), and was in all_reduce" in str(timeout)
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank].error, PeerFailed) and outcomes[rank].error.missing[0] == 4, outcomes[rank]


@HOSTS
@is_async
def test_a_rank_whose_call_another_timeout_ended_names_the_rank_that_it_waited_for(
    is_async: bool, hosts: list[int] | None
) -> None:
    ends = run_ranks(pass_the_deadline, 3, is_async, MeetingOfThreads(3), hosts=hosts, backend="yieldsnext")
    expected = [(CollectiveTimeout, (1,)), (PeerFailed, (1, 2)), (PeerFailed, (1,))]
    assert [(kind, missing) for kind, missing, _ in ends] == expected
    failed = "rank 0 failed: its time limit of 0.5 s passed while it waited for rank 1"
    assert f"{failed}; rank 1 waited for rank 2. " in ends[1][2]
    assert f"{failed}. " in ends[2][2]


def fail_by_the_last(meeting: MeetingOfThreads, size: int, others_fail: threading.Barrier) -> str:
    meeting.meet()
    if dist.get_rank() == size - 1:
        meeting.wait_for_calls_of(*range(size - 1))
    with pytest.raises((CollectiveTimeout, PeerFailed)) as raised:
        reduce(4, False, 0.5 if dist.get_rank() == size - 1 else 20)
    if dist.get_rank() > 0 and others_fail.wait(20) == 0:
        YieldsPrevious.others_have_failed.set()
    meeting.meet()
    return str(raised.value)


@pytest.mark.parametrize("size", [3, 4])
def test_ranks_that_wait_for_each_other_in_a_chain_name_the_last_one(size: int) -> None:
    YieldsPrevious.others_have_failed.clear()
    ends = run_ranks(
        fail_by_the_last, size, MeetingOfThreads(size), size, threading.Barrier(size - 1), backend="yieldsprevious"
    )
    last = size - 1
    failed = f"rank {last} failed: its time limit of 0.5 s passed while it waited for rank {last - 1}"
    for rank in range(1, last):
        assert failed in ends[rank] and f"; rank {rank} waited for rank {rank - 1}. " in ends[rank], ends
    assert failed in ends[0] and "this rank" not in ends[0], ends


def reduce_on_a_backend_that_yields_no_rank(meeting: MeetingOfThreads) -> None:
    with pytest.raises((GroupBroken, PeerFailed), match=r"must yield ranks from 0 to 1, or None, but yielded 3"):
        reduce(4, False)
    meeting.meet()


def test_a_transfer_that_yields_no_rank_ends_the_group() -> None:
    run_ranks(reduce_on_a_backend_that_yields_no_rank, 2, MeetingOfThreads(2), backend="yieldsnorank")


def wait_inside(number: int, how: str, meeting: MeetingOfThreads) -> None:
    name = list(WAITS)[number]
    Waiting.contexts[dist.get_rank()] = copy_context()
    with pytest.raises((GroupBroken, PeerFailed), match=f"{name} was called inside a backend's transfer") as raised:
        if how == "the progress thread":
            work = dist.all_reduce(np.ones(number + 1, np.float32), async_op=True)
            assert work is not None
            wait_until(work.is_completed, 20)
            work.wait()
        else:
            reduce(number + 1, how == "wait")
    if dist.get_rank() == 1:
        assert type(raised.value.__cause__) is DistBackendError
    meeting.meet()


@pytest.mark.parametrize("how", ["a blocking call", "wait", "the progress thread"])
@pytest.mark.parametrize("number", range(len(WAITS)), ids=list(WAITS))
def test_a_transfer_that_waits_without_yielding_is_refused(number: int, how: str) -> None:
    run_ranks(wait_inside, 2, number, how, MeetingOfThreads(2), backend="waiting")
