"""A rank that is late: those who wait for it say so on stderr, with its rank and what it is doing."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from failures.waiting_calls import ABSENT, FORMS, TRANSPORTS, on, perform

import procgroup as dist
from world import World, run, start, wait_until

FIRST = "0.6"


def come_when_told(rank: int, name: str, async_op: bool) -> None:
    """Make one call; the absent rank makes it when the others have reported, which a file says."""
    dist.init_process_group(timeout=40)
    dist.barrier()
    go = Path(os.environ["GO"])
    if rank == ABSENT:
        while not go.exists():
            time.sleep(0.01)
    if name in ("send", "recv") and rank == ABSENT:
        other = {"send": "recv", "recv": "send"}[name]
        array = np.ones(8 if name == "recv" else 1_000_000)
        getattr(dist, other)(array, 0)
    elif name not in ("send", "recv") or rank == 0:
        perform(name, async_op)


def late(rank: int, size: int, name: str, async_op: bool) -> None:
    come_when_told(rank, name, async_op)


def reported(world: World, rank: int, call: str) -> str:
    """Wait for a rank's report on this call, and return all that it has printed."""
    world.wait_for_output(rank, f" in {call}", timeout=30)
    wait_until(lambda: world.output(rank).endswith("\n"))
    return world.output(rank)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("name", "async_op"),
    [("all_reduce", False), ("all_reduce", True), ("barrier", False), ("recv", False), ("recv", True), ("send", False)],
)
def test_a_rank_that_waits_names_the_late_rank_and_its_call(
    tmp_path: Path, transport: str, name: str, async_op: bool
) -> None:
    go = tmp_path / "go"
    environment = on(transport) | {"PROCGROUP_WAIT_REPORT_SECONDS": FIRST, "GO": str(go)}
    assert name in FORMS
    with start(late, 3, args=(name, async_op), environment=environment) as world:
        waiting = [0] if name in ("send", "recv") else [0, 2]
        call = "barrier #2" if name == "barrier" else f"{name} #"  # the first barrier may have been reported too
        lines = {rank: reported(world, rank, call) for rank in waiting}
        go.touch()
        outcomes = world.wait(40)
    assert all(outcome.ok for outcome in outcomes), outcomes
    for rank, line in lines.items():
        pattern = (
            rf"\[rank{rank}\]: procgroup WARNING: rank {rank} has waited \d+(\.\d)? s \(since \d\d:\d\d:\d\d\) "
            rf"for rank 1 in {call}\d* on group 0, at operation_table\.py:\d+"
        )
        here = r"\(test_late_ranks\.py:\d+\)"
        inside = rf"\w+ \(\w+\.py:\d+\), called by come_when_told {here}"  # of Path.exists
        place = rf"in (come_when_told {here}, called by late {here}|{inside}); it is in no call"
        found = re.search(pattern + rf": rank 1 is ({place}|in barrier|in no call for|not answering).*\n", line)
        assert found, line
        assert line.count(f" in {call}") == 1, line  # the next one is due a minute later


def host_the_store_when_told(rank: int, size: int) -> None:
    go = Path(os.environ["GO"])
    if rank == 0:
        wait_until(go.exists)
    dist.init_process_group(timeout=40, pg_options={"init_method_timeout": 30})
    dist.barrier()


def test_a_rank_that_cannot_reach_the_store_says_who_hosts_it(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with start(
        host_the_store_when_told, 2, environment={"PROCGROUP_WAIT_REPORT_SECONDS": FIRST, "GO": str(go)}
    ) as world:
        world.wait_for_output(1, "it tries for", timeout=30)
        world.wait_for_output(1, "\n", timeout=30)
        line = world.output(1)
        go.touch()
        outcomes = world.wait(40)
    assert all(outcome.ok for outcome in outcomes), outcomes
    pattern = (
        r"\[rank1\]: procgroup WARNING: rank 1 has not reached the store at 127\.0\.0\.1:\d+, which rank 0 hosts; "
        r"it tries for 30 s\n"
    )
    assert re.fullmatch(pattern, line), line


def late_to_a_group(rank: int, size: int, in_recv: Path, has_reported: Path) -> None:
    dist.init_process_group(timeout=40)
    dist.new_group([2, 1])
    if rank == 1:
        array = np.zeros(1)
        dist.recv(array, 0)
    elif rank == 0:
        wait_until(has_reported.exists)
        dist.send(np.ones(1), 1)
    else:
        wait_until(in_recv.exists)
    if rank > 0:
        group = dist.new_group([1, 2])
        dist.all_reduce(np.ones(2), group=group)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_group_that_waits_for_a_member_names_its_global_rank_and_the_call_it_is_in(
    tmp_path: Path, transport: str
) -> None:
    environment = on(transport) | {"PROCGROUP_WAIT_REPORT_SECONDS": FIRST}
    for number in range(3):  # a rank that does not get to run does not answer in the 0.3 s that it is given
        in_recv, has_reported = tmp_path / f"in recv {number}", tmp_path / f"has reported {number}"
        with start(late_to_a_group, 3, args=(in_recv, has_reported), environment=environment) as world:
            world.wait_for_call(1, "recv")
            in_recv.touch()
            world.wait_for_output(2, " for rank 1 in new_group([1, 2])")
            has_reported.touch()
            outcomes = world.wait(40)
        assert all(outcome.ok for outcome in outcomes), outcomes
        if "not answering" not in outcomes[2].output:
            break
    waits = outcomes[2].output
    assert re.search(
        r"rank 2 has waited .* for rank 1 in new_group\(\[1, 2\]\)[^\n]*: rank 1 is in recv of 1 float64 from rank 0",
        waits,
    ), waits


def post_and_wait_for_nothing(rank: int, size: int) -> None:
    dist.init_process_group(timeout=40)
    array = np.zeros(1)
    if rank == 0:
        work = dist.irecv(array, 1)
        time.sleep(1)  # longer than what is reported: nobody waits
        dist.barrier()
        assert work is not None and work.wait()
    else:
        time.sleep(1)
        dist.send(array, 0)  # so that rank 0 need not wait for it after the barrier
        dist.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receive_that_was_posted_ahead_is_not_reported(transport: str) -> None:
    environment = on(transport) | {"PROCGROUP_WAIT_REPORT_SECONDS": "0.8"}
    with start(post_and_wait_for_nothing, 2, environment=environment) as world:
        outcomes = world.wait(40)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert "in recv" not in outcomes[0].output, outcomes[0].output


def sleep_before_a_barrier(rank: int, size: int) -> None:
    dist.init_process_group(timeout=40)
    if rank == 1:
        time.sleep(1)
    dist.barrier()


def test_zero_turns_the_reports_off() -> None:
    with start(sleep_before_a_barrier, 2, environment={"PROCGROUP_WAIT_REPORT_SECONDS": "0"}) as world:
        outcomes = world.wait(40)
    assert [outcome.output for outcome in outcomes] == ["", ""]


def test_another_value_is_refused_in_words() -> None:
    with pytest.raises(Exception, match="PROCGROUP_WAIT_REPORT_SECONDS='soon' is not usable"):
        run(sleep_before_a_barrier, 2, environment={"PROCGROUP_WAIT_REPORT_SECONDS": "soon"})
