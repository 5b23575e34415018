"""``with timeout(...)``: for which calls it counts, in which threads and tasks, and what wins over it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import procgroup as dist
from procgroup.testing import run_ranks

SHORT = 0.2
LONG = 30.0


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds after which a call that waits for an absent rank says that it has timed out."""
    with pytest.raises(dist.CollectiveTimeout) as caught:
        call()
    seconds: float = caught.value.seconds
    return seconds


def on_rank_0(check: Callable[[], Any]) -> Any:
    """Return what ``check`` returns on rank 0 while rank 1 is there and makes no call."""
    has_ended = threading.Event()

    def be() -> Any:
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(LONG)
        if dist.get_rank() == 1:
            return has_ended.wait(LONG)
        try:
            return check()
        finally:
            has_ended.set()

    return run_ranks(be, 2)[0]


def receive(**how: Any) -> Any:
    """Receive what is never sent: a receive that fails does not end the group."""
    return dist.recv(np.zeros(1), 1, **how)


def test_the_innermost_block_counts_and_the_calls_own_timeout_wins() -> None:
    def check() -> list[float]:
        found = []
        with dist.timeout(LONG):
            with dist.timeout(timedelta(seconds=SHORT)):
                found.append(seconds_of(receive))
                found.append(seconds_of(lambda: receive(timeout=SHORT / 2)))
                with dist.timeout(SHORT / 4):
                    found.append(seconds_of(receive))
                found.append(seconds_of(receive))
            with pytest.raises(ValueError, match="x"), dist.timeout(SHORT):
                raise ValueError("x")
            assert dist.group.WORLD is not None
            dist.group.WORLD.set_timeout(SHORT / 2)
        found.append(seconds_of(receive))
        return found

    assert on_rank_0(check) == [SHORT, SHORT / 2, SHORT / 4, SHORT, SHORT / 2]


def test_a_function_can_be_decorated_and_call_itself() -> None:
    @dist.timeout(SHORT)
    def attempt(depth: int) -> float:
        return attempt(depth - 1) if depth else seconds_of(receive)

    assert on_rank_0(lambda: attempt(2)) == SHORT


MESSAGES: dict[str, Callable[[], Any]] = {
    "recv": receive,
    "recv from any rank": lambda: dist.recv(np.zeros(1)),
    "irecv": lambda: dist.irecv(np.zeros(1), 1).wait(),
    "send": lambda: dist.send(np.zeros(1_000_000), 1),
    "isend": lambda: dist.isend(np.zeros(1_000_000), 1).wait(),
    "recv_object_list": lambda: dist.recv_object_list([None], 1),
    "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, np.zeros(1), 1)])[0].wait(),
    "the methods of groups": lambda: dist.group.WORLD.recv(np.zeros(1), 1),  # type: ignore[union-attr]
}
COLLECTIVES: dict[str, Callable[[], Any]] = {
    "monitored_barrier": dist.monitored_barrier,
    "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
    "all_reduce of a list": lambda: dist.all_reduce_coalesced([np.zeros(1), np.zeros(3)]),
    "all_gather of a list": lambda: dist.all_gather_coalesced([[np.zeros(1)], [np.zeros(1)]], [np.zeros(1)]),
    "functional": lambda: dist.functional.all_reduce(np.zeros(1)),
    "new_group": dist.new_group,
}


@pytest.mark.parametrize("name", [*MESSAGES, *COLLECTIVES])
def test_every_form_of_a_call_has_the_timeout_of_the_block(name: str) -> None:
    def check() -> float:
        with dist.timeout(SHORT):
            return seconds_of((MESSAGES | COLLECTIVES)[name])

    assert SHORT / 4 < on_rank_0(check) <= SHORT  # a call on objects counts from its beginning


def test_a_coalescing_manager_has_a_timeout_for_its_calls() -> None:
    def check() -> float:
        def call() -> None:
            with dist._coalescing_manager(timeout=SHORT):
                dist.all_reduce(np.zeros(1))
                dist.all_reduce(np.zeros(1))

        return seconds_of(call)

    assert on_rank_0(check) == SHORT


def test_a_batch_of_messages_has_a_timeout() -> None:
    def check() -> float:
        messages = [dist.P2POp(dist.irecv, np.zeros(1), 1)]
        return seconds_of(lambda: dist.batch_isend_irecv(messages, timeout=SHORT)[0].wait())

    assert on_rank_0(check) == SHORT


def test_a_group_that_is_made_in_a_block_outlives_it() -> None:
    def check() -> tuple[float, float]:
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(LONG)
        with dist.timeout(10):
            made = dist.new_group(), dist.new_group(timeout=LONG / 2)
        return made[0].timeout.total_seconds(), made[1].timeout.total_seconds()

    assert run_ranks(check, 2) == [(LONG, LONG / 2)] * 2, "a group has its parent's timeout, or its own"


def test_a_wait_ends_with_the_block_and_its_call_goes_on() -> None:
    def check() -> Any:
        work = dist.irecv(np.zeros(1), 1, timeout=4 * SHORT)
        with dist.timeout(SHORT), pytest.raises(dist.WaitTimeout) as caught:
            work.wait()
        with dist.timeout(LONG):
            return caught.value.seconds, seconds_of(work.wait)

    assert on_rank_0(check) == (SHORT, 4 * SHORT)


def test_a_call_and_the_wait_for_it_in_one_block_end_by_the_deadline_of_the_call() -> None:
    def check() -> float:
        with dist.timeout(SHORT):
            return seconds_of(lambda: dist.all_reduce(np.zeros(1), async_op=True).wait())

    assert on_rank_0(check) == SHORT


def test_a_store_has_the_timeout_of_the_block() -> None:
    store = dist.PrefixStore("a", dist.HashStore())
    with dist.timeout(SHORT):
        for wait in (lambda: store.get("x"), lambda: store.wait(["x"]), lambda: store.barrier("x", 2)):
            with pytest.raises(dist.StoreTimeout) as caught:
                wait()
            assert caught.value.seconds == SHORT
        with pytest.raises(dist.StoreTimeout) as caught:
            store.get("x", timeout=SHORT / 2)
        assert caught.value.seconds == SHORT / 2


def test_the_wait_for_the_other_ranks_has_the_timeout_of_the_block() -> None:
    store = dist.HashStore()
    with dist.timeout(SHORT), pytest.raises(dist.RendezvousTimeout) as caught:
        dist.init_process_group(store=store, rank=0, world_size=2)
    assert caught.value.seconds == SHORT


def test_each_thread_has_blocks_of_its_own() -> None:
    """Ranks are threads here: the block of one does not concern the other."""

    meet = threading.Barrier(2, timeout=LONG)

    def check() -> float:
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(2 * SHORT)
        with dist.timeout(SHORT) if dist.get_rank() == 0 else contextlib.nullcontext():
            meet.wait()
            seconds = seconds_of(lambda: dist.recv(np.zeros(1), 1 - dist.get_rank()))
        meet.wait()
        return seconds

    assert run_ranks(check, 2) == [SHORT, 2 * SHORT]


def test_each_task_has_blocks_of_its_own() -> None:
    def check() -> list[float]:
        async def attempt(limit: float) -> float:
            with dist.timeout(limit):
                await asyncio.sleep(0)  # the other task enters its block
                return seconds_of(receive)

        async def both() -> list[float]:
            return await asyncio.gather(attempt(SHORT), attempt(SHORT / 2))

        return asyncio.run(both())

    assert on_rank_0(check) == [SHORT, SHORT / 2]


def test_a_group_that_intercepts_its_calls_has_the_timeout_of_the_block() -> None:
    def check() -> tuple[float, list[Any]]:
        assert dist.group.WORLD is not None
        seen: list[Any] = []
        dist.group.WORLD.add_hook(lambda op, arguments: seen.append(arguments[-1]))
        with dist.timeout(SHORT):
            return seconds_of(receive), seen

    assert on_rank_0(check) == (SHORT, [SHORT])


@pytest.mark.parametrize("bad", [-1, float("nan"), "5", True, None])
def test_a_block_of_no_length_of_time_is_refused(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="expected timeout to be"):
        dist.timeout(bad)


def test_an_issued_call_has_the_time_of_destroy_process_group() -> None:
    def check() -> float:
        dist.irecv(np.zeros(1), 1)
        started = time.monotonic()
        dist.destroy_process_group(timeout=SHORT)
        return time.monotonic() - started

    assert SHORT <= on_rank_0(check) < LONG / 2
