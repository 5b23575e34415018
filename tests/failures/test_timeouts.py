"""Deadlines: per call, per group, on wait; each ends its call within half a second."""

from __future__ import annotations

import contextlib
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failures.waiting_calls import ABSENT, COLLECTIVES, FORMS, TRANSPORTS, allowance, on, perform

import procgroup as dist
from world import start, wait_until

transports = pytest.mark.parametrize("transport", TRANSPORTS)

LIMIT = 0.6


def stay_away(rank: int) -> bool:
    """Let one rank be alive and absent until the test ends it."""
    if rank == ABSENT:
        time.sleep(60)
    return rank == ABSENT


def time_out(rank: int, size: int, operation: str, where: str, async_op: bool) -> Any:
    dist.init_process_group(timeout=LIMIT if where == "group" else 30, pg_options={"init_method_timeout": 20})
    if stay_away(rank):
        return None
    if where == "set_timeout":
        dist.group.WORLD.set_timeout(timedelta(seconds=LIMIT))
    started = time.monotonic()
    block = dist.timeout(LIMIT) if where == "context" else contextlib.nullcontext()
    with pytest.raises(dist.CollectiveTimeout) as caught, block:
        perform(operation, async_op, **({"timeout": LIMIT} if where == "call" else {}))
    took = time.monotonic() - started
    error = caught.value
    assert error.seconds == LIMIT and error.op == operation.split()[0]
    assert ABSENT in error.missing and 0 not in error.missing, error.missing
    assert f"rank {ABSENT}" in str(error) and f"{LIMIT:g} s" in str(error)
    later = None
    if operation in COLLECTIVES:
        with pytest.raises(dist.GroupBroken):
            dist.barrier()
        later = "GroupBroken"
    print("over", flush=True)
    return took, later


def expect_time_out(transport: str, operation: str, where: str, async_op: bool) -> None:
    with start(time_out, 2, args=(operation, where, async_op), environment=on(transport)) as world:
        world.wait_for_output(0, "over", 20)
        world.kill(ABSENT)
        outcome = world.wait()[0]
    assert outcome.ok, outcome.traceback
    took = outcome.value[0]
    assert LIMIT - 0.01 <= took < LIMIT + allowance(0.5), took


@transports
@pytest.mark.parametrize("operation", FORMS)
def test_every_operation_ends_at_its_own_deadline(transport: str, operation: str) -> None:
    expect_time_out(transport, operation, "call", async_op=False)


@transports
@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
@pytest.mark.parametrize("where", ["context", "group", "set_timeout"])
def test_a_call_without_a_limit_has_its_contexts_or_the_groups(transport: str, operation: str, where: str) -> None:
    expect_time_out(transport, operation, where, async_op=False)


@transports
@pytest.mark.parametrize("operation", ["all_reduce", "all_reduce of a large array", "send", "recv"])
@pytest.mark.parametrize("where", ["call", "context"])
def test_an_async_call_ends_at_its_deadline(transport: str, operation: str, where: str) -> None:
    expect_time_out(transport, operation, where, async_op=True)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.999849, "1 s"), (599.98, "600 s"), (1800.0, "1800 s"), (0.05, "0.05 s"), (2.5, "2.5 s")]
)
def test_what_a_call_has_left_of_its_limit_is_said_in_three_digits(seconds: float, said: str) -> None:
    error = dist.CollectiveTimeout(missing=[1], seconds=seconds, op="recv", sequence=1, group="0", rank=0, size=2)
    assert f": not complete after {said}; still waiting for rank 1" in str(error) and error.seconds == seconds


def wait_for_a_while(rank: int, size: int) -> Any:
    dist.init_process_group(timeout=20)
    array = np.ones(5)
    if rank == ABSENT:
        dist.recv(np.zeros(1), 0)
    work: Any = dist.all_reduce(array, async_op=True)
    if rank == 0:
        for limit in (0.3, timedelta(seconds=0.2)):
            started = time.monotonic()
            with pytest.raises(dist.WaitTimeout) as caught:
                work.wait(limit)
            assert time.monotonic() - started < 0.3 + allowance(0.5)
            assert caught.value.seconds in (0.3, 0.2) and caught.value.op == "all_reduce"
        assert not work.is_completed() and work.exception() is None
        dist.send(np.zeros(1), ABSENT)
    assert work.wait()
    assert (array == size).all()
    dist.all_reduce(array)
    assert (array == size * size).all(), "the group is as good as before"


@transports
def test_a_wait_that_ends_early_leaves_the_call_as_it_was(transport: str) -> None:
    with start(wait_for_a_while, 2, environment=on(transport)) as world:
        outcomes = world.wait(20)
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]


def be_told_of_a_timeout(rank: int, size: int, is_awaited: Path) -> Any:
    dist.init_process_group(timeout=30)
    if stay_away(rank):
        return None
    if rank == 0:
        wait_until(is_awaited.exists)
    with pytest.raises(dist.DistError) as caught:
        dist.all_reduce(np.ones(5), timeout=LIMIT if rank == 0 else 20)
    print("over", flush=True)
    return type(caught.value).__name__, getattr(caught.value, "peer", None), str(caught.value)


@transports
def test_the_others_are_told_when_one_ranks_deadline_passes(tmp_path: Path, transport: str) -> None:
    is_awaited = tmp_path / "is awaited"
    with start(be_told_of_a_timeout, 3, args=(is_awaited,), environment=on(transport)) as world:
        world.wait_for_call(2, "all_reduce")
        is_awaited.touch()
        world.wait_for_output(0, "over", 20)
        world.wait_for_output(2, "over", 20)
        world.kill(ABSENT)
        outcomes = world.wait()
    assert outcomes[0].value[0] == "CollectiveTimeout"
    name, peer, text = outcomes[2].value
    assert (name, peer) == ("PeerFailed", 0)
    assert f"rank 0 failed: its time limit of {LIMIT:g} s passed while it waited for rank {ABSENT}" in text


def wait_for_ranks_that_do_other_things(rank: int, size: int, are_in_their_calls: Path) -> Any:
    dist.init_process_group(timeout=30)
    pair = dist.new_group([0, 1])
    dist.barrier()
    go = np.zeros(1)
    if rank == 1:
        dist.irecv(np.zeros(4), 2, tag=7)
        dist.recv(go, 0)
    elif rank == 2:
        time.sleep(60)
    elif rank == 3:
        dist.recv(np.zeros(4, np.float32), 0, tag=5)
    wait_until(are_in_their_calls.exists)
    with pytest.raises(dist.CollectiveTimeout) as caught:
        dist.all_reduce(np.ones(5), group=pair, timeout=0.3)
    of_pair = caught.value.calls
    with pytest.raises(dist.CollectiveTimeout) as caught:
        dist.all_reduce(np.ones(5), timeout=0.3)
    print("over", flush=True)
    return caught.value.missing, caught.value.calls, str(caught.value), of_pair


@transports
def test_a_timeout_says_what_each_missing_rank_is_doing(tmp_path: Path, transport: str) -> None:
    for number in range(3):  # a rank that does not get to run does not answer in the 0.3 s that it is given
        others = tmp_path / f"others {number}"
        with start(wait_for_ranks_that_do_other_things, 4, args=(others,), environment=on(transport)) as world:
            for rank in (1, 3):
                world.wait_for_call(rank, "recv")
            world.wait_until_idle()
            others.touch()
            world.wait_for_output(0, "over", 20)
            world.kill(2)  # the others' calls end with rank 0's group
            missing, calls, text, calls_of_pair = world.wait()[0].value
        if "not answering" not in calls[1] + calls[3] + calls_of_pair[1] and calls[2].startswith("in wait_for"):
            break
    assert missing == (1, 2, 3)
    here = r"at test_timeouts\.py:\d+"
    posted = (
        rf"in recv of 4 float64 from rank 2 \(call #1\) {here} and recv of 1 float64 from rank 0 \(call #2\) {here}"
    )
    assert re.fullmatch(posted, calls[1]), calls
    sleeping = r"in wait_for_ranks_that_do_other_things \(test_timeouts\.py:\d+\), called by \w+ \(\w+\.py:\d+\); "
    assert re.match(sleeping + r"it is in no call for .* its last was barrier \(call #1\)", calls[2]), calls
    assert re.fullmatch(rf"in recv of 4 float32 from rank 0 \(call #1\) {here}", calls[3]), calls
    assert "still waiting for ranks 1, 2, 3: rank 1 is in recv of 4 float64 from rank 2 (call #1)" in text
    assert f"; rank 3 is {calls[3]}. " in text
    assert "recv of 1 float64 from rank 0 (call #2 on group 0) at test_timeouts.py" in calls_of_pair[1], calls_of_pair


@pytest.mark.parametrize("bad", [-1, float("nan"), "5", True, None])
def test_a_timeout_that_is_no_length_of_time_is_refused(bad: Any) -> None:
    with start(use_a_bad_timeout, 1, args=(bad,)) as world:
        outcome = world.wait()[0]
    assert outcome.ok, outcome.traceback


def use_a_bad_timeout(rank: int, size: int, bad: Any) -> None:
    dist.init_process_group()
    array = np.ones(3)
    if bad is None:  # the group's own
        dist.all_reduce(array, timeout=None)
        return
    with pytest.raises((TypeError, ValueError), match="timeout"):
        dist.all_reduce(array, timeout=bad)
    with pytest.raises((TypeError, ValueError), match="timeout"):
        dist.group.WORLD.set_timeout(bad)
    dist.all_reduce(array)
