"""What a process waits for at its end, for how long, and what it says meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import procgroup as dist
import two_hosts
from procgroup.errors import CollectiveTimeout
from procgroup.process import process_end, state
from world import World, start, wait_until


def time_out_because_a_rank_is_stopped(rank: int, size: int) -> float:
    dist.init_process_group(timeout=1.5, pg_options={"init_method_timeout": 20})
    dist.barrier()
    if rank == 1:
        print("stopping", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(CollectiveTimeout):
        dist.barrier()
    return time.monotonic()


def test_the_host_of_the_store_waits_2_s_for_a_stopped_rank_when_the_job_is_broken() -> None:
    with start(time_out_because_a_rank_is_stopped, 2) as world:
        world.wait_for_output(1, "stopping")
        world.wait_for_end([0])
        ended = time.monotonic()
        world.kill(1)
        (outcome, _) = world.wait()
    assert ended - outcome.value < 20, "not 30 s, as for a rank that may still end"
    assert outcome.output == ""


def end_before_the_others(rank: int, size: int) -> None:
    dist.init_process_group()
    dist.barrier()
    awaited = {0: "TWO_HAS_ENDED", 1: "GO_ON"}.get(rank)
    if awaited:
        wait_until(Path(os.environ[awaited]).exists)


def test_the_host_of_the_store_says_for_whom_it_waits(tmp_path: Any) -> None:
    go_on, two_has_ended = tmp_path / "go on", tmp_path / "two has ended"
    environment = {"GO_ON": str(go_on), "TWO_HAS_ENDED": str(two_has_ended)}
    with start(end_before_the_others, 3, environment=environment) as world:
        world.wait_for_end([2])
        two_has_ended.touch()
        world.wait_for_output(0, " s more\n")
        assert re.search(r"for at most 2\d s more\n", world.output(0))
        assert "[rank0]: procgroup WARNING: this process hosts the store and waits for rank 1 (" in world.output(0)
        assert f" pid {world.pids[1]}) to end" in world.output(0)
        go_on.touch()
        outcomes = world.wait()
    assert all(outcome.ok for outcome in outcomes)
    assert outcomes[0].output.count("\n") == 1


def leave_while_others_are_late(rank: int, size: int, subgroup: bool) -> None:
    dist.init_process_group()
    group = dist.new_group([0, 1]) if subgroup else None
    dist.barrier()
    if rank == 1:
        wait_until(Path(os.environ["GO_ON"]).exists)
        dist.all_reduce(np.ones(4), group=group)
    else:
        dist.all_reduce(np.ones(4), group=group, async_op=True)
        dist.destroy_process_group(group)


@pytest.mark.parametrize("subgroup", [False, True])
def test_a_rank_that_leaves_a_group_says_what_it_waits_for(subgroup: bool, tmp_path: Any) -> None:
    go_on = tmp_path / "go on"
    with start(leave_while_others_are_late, 2, args=(subgroup,), environment={"GO_ON": str(go_on)}) as world:
        what = "leaves a group" if subgroup else "leaves its groups"
        world.wait_for_output(
            0, f"[rank0]: procgroup WARNING: rank 0 {what} and waits for all_reduce(SUM) of 4 float64 (#"
        )
        go_on.touch()
        assert all(outcome.ok for outcome in world.wait())


def test_all_waits_are_short_together_after_a_failure_and_silent() -> None:
    process_end.note_failure()
    try:
        started = time.monotonic()
        for _ in range(3):
            process_end.wait_for_others(lambda: False, 30, lambda: pytest.fail("it has said something"), 0.01)
        assert 1.9 < time.monotonic() - started < 5
    finally:
        process_end.forget_failure()
    assert not state.has_failed


def test_groups_that_are_destroyed_one_after_another_have_their_whole_time_each() -> None:
    process_end.forget_failure()  # of ranks that other tests ran in this process
    started = time.monotonic()
    for _ in range(3):
        assert not process_end.wait_for_others(lambda: False, 0.2, str, 0.01)
        assert process_end.wait_for_others(lambda: True, 0.2, str, 0.01)
    assert time.monotonic() - started >= 3 * 0.2


def send_through_a_cut_cable(rank: int, size: int, destroy: bool) -> None:
    dist.init_process_group()
    dist.barrier()
    print("joined", flush=True)
    wait_until(Path(os.environ["GO_ON"]).exists)
    if rank == 0:
        dist.send(np.ones(1000), 1)
        if destroy:
            dist.destroy_process_group(timeout=0.5)
    elif destroy:
        time.sleep(60)


@contextmanager
def cut_before_the_send(tmp_path: Path, *, destroy: bool) -> Iterator[tuple[World, list[str]]]:
    """Give two ranks on two hosts, the cable between which is cut, and the command that sets the cable."""
    go_on = tmp_path / "go on"
    with two_hosts.joined() as hosts:
        places = two_hosts.environments(hosts, [0, 1])
        environment = {"GO_ON": str(go_on)}
        with start(send_through_a_cut_cable, 2, args=(destroy,), environment=environment, environments=places) as world:
            for rank in range(2):
                world.wait_for_output(rank, "joined")
            cable = hosts[1].command(["ip", "link", "set", "cable"])
            subprocess.run([*cable, "down"], check=True)
            go_on.touch()
            yield world, cable


@pytest.mark.skipif(bool(two_hosts.lacks()), reason=two_hosts.lacks())
def test_a_rank_that_leaves_names_those_who_have_not_taken_what_it_sent(tmp_path: Path) -> None:
    with cut_before_the_send(tmp_path, destroy=False) as (world, cable):
        world.wait_for_output(0, "rank 0 leaves its groups and waits for rank 1 to take what was sent, for at most ")
        subprocess.run([*cable, "up"], check=True)
        assert world.wait()[0].ok


@pytest.mark.skipif(bool(two_hosts.lacks()), reason=two_hosts.lacks())
def test_the_host_of_the_store_does_not_wait_for_those_for_whom_it_has_waited_in_vain(tmp_path: Path) -> None:
    with cut_before_the_send(tmp_path, destroy=True) as (world, _):
        world.wait_for_end([0])
        assert "hosts the store" not in world.output(0)
