"""Ranks and nodes that fail, in jobs of several nodes: who starts again, what is counted, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from launch.agents import WITHIN, Job, Start, is_running, lose, start_all, static, wait_until

MakeJob = Callable[..., Job]

SLOW = pytest.mark.slow
C10D = pytest.mark.parametrize("elastic_flags", ["c10d", pytest.param("file", marks=SLOW)], indirect=True)


@pytest.mark.parametrize(
    "failure",
    [
        "raise ValueError('once')",
        pytest.param("sys.exit(3)", marks=SLOW),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", marks=SLOW),
    ],
)
def test_a_failed_rank_starts_the_ranks_of_all_nodes_again_and_every_node_says_so(
    make_job: MakeJob, failure: str
) -> None:
    job = make_job(*static(2), "--max-restarts", "3", "--nproc-per-node", "2")
    agents = start_all(job, 2)
    before = job.wait_for_round(4, restarts=0)
    job.order(2, failure)
    job.wait_for_round(4, restarts=1, after=before)
    for agent in agents:
        assert agent.stderr.count("; restart 1 of 3") == 1
        assert "; restart 2 of 3" not in agent.stderr
    assert job.finish() == [0, 0]


def test_ranks_that_fail_together_on_several_nodes_count_as_one_restart(make_job: MakeJob) -> None:
    job = make_job(*static(2), "--max-restarts", "2", "--nproc-per-node", "2")
    start_all(job, 2)
    for restarts in range(2):
        for start in job.wait_for_round(4, restarts=restarts):
            os.kill(start.pid, signal.SIGKILL)
    job.wait_for_round(4, restarts=2)
    assert job.finish() == [0, 0]


@C10D
def test_restarts_are_counted_to_the_last_one_and_then_the_job_fails(elastic_flags: Any, make_job: MakeJob) -> None:
    job = make_job(*elastic_flags("2"), "--max-restarts", "2")
    agents = [job.start(), job.start()]
    for restarts in range(3):
        job.wait_for_round(2, restarts=restarts)
        job.order(restarts % 2, "sys.exit(17)")
    assert job.wait() == [17, 17]
    for agent in agents:
        assert [f"; restart {number} of 2" in agent.stderr for number in (1, 2, 3)] == [True, True, False]


def test_every_node_ends_with_the_traceback_of_the_rank_that_failed_first(make_job: MakeJob) -> None:
    job = make_job(*static(3))
    agents = start_all(job, 3)
    starts = job.wait_for_round(3)
    for waiting in (0, 1):
        job.order(waiting, "dist.barrier()")  # raises, too, when rank 2 has failed
    job.order(2, "raise ValueError('boom on two')")
    assert job.wait() == [1, 1, 1]
    for agent in agents:
        lines = agent.stderr.splitlines()
        (heading,) = (number for number, line in enumerate(lines) if " failed first: " in line)
        assert lines[heading].startswith("rank 2 (")
        assert lines[heading].endswith(f"pid {starts[2].pid}) failed first: ValueError: boom on two")
        assert lines[heading + 1] == "Traceback (most recent call last):"
        assert lines[-1] == "ValueError: boom on two"


@pytest.mark.parametrize(
    ("failure", "status"), [("sys.exit(17)", 17), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)]
)
def test_all_agents_end_with_the_status_of_the_rank_that_failed_first(
    make_job: MakeJob, failure: str, status: int
) -> None:
    job = make_job(*static(2))
    start_all(job, 2)
    job.wait_for_round(2)
    job.order(1, failure)
    assert job.wait() == [status, status]


def test_ranks_that_ignore_sigterm_after_a_failure_get_the_shutdown_timeout_and_no_more(make_job: MakeJob) -> None:
    job = make_job(*static(2), "--shutdown-timeout", "1.5")
    agents = start_all(job, 2)
    resisting, failing = job.wait_for_round(2)
    job.order(0, "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('resists', flush=True)")
    agents[0].wait_for("resists")
    began = time.monotonic()
    job.order(1, "sys.exit(9)")
    wait_until(lambda: not is_running(failing.pid), WITHIN)
    assert job.wait() == [9, 9]
    assert not is_running(resisting.pid)
    assert 1.5 < time.monotonic() - began < 1.5 + WITHIN, "without that flag it would be 30 s, and then 10"


@pytest.mark.parametrize("lost", [0, 1], ids=["the one that hosts the store", "another one"])
def test_a_fixed_job_without_restarts_ends_when_an_agent_is_killed_and_names_its_node(
    make_job: MakeJob, lost: int
) -> None:
    job = make_job(*static(2))
    agents = start_all(job, 2)
    job.wait_for_round(2)
    deadline = lose(agents[lost])
    assert agents[1 - lost].wait(deadline - time.monotonic()) == 1
    assert f"{socket.gethostname()} (agent's pid {agents[lost].process.pid}) was lost" in agents[1 - lost].stderr


@pytest.mark.parametrize("lost", [0, 1], ids=["the one that hosts the store", "another one"])
def test_a_fixed_job_with_a_restart_left_waits_for_the_lost_node_to_come_back(make_job: MakeJob, lost: int) -> None:
    job = make_job(*static(2), "--max-restarts", "1")
    agents = start_all(job, 2)
    before = job.wait_for_round(2)
    deadline = lose(agents[lost])
    wait_until(lambda: not agents[1 - lost].running(), deadline - time.monotonic(), lambda: job.output)
    job.start("--node-rank", str(lost))
    job.wait_for_round(2, restarts=1, after=before)
    assert sorted(job.finish()) == [-signal.SIGKILL, 0, 0]


@C10D
def test_an_elastic_job_of_fixed_size_waits_for_a_lost_node_no_longer_than_join_timeout(
    elastic_flags: Any, make_job: MakeJob
) -> None:
    job = make_job(*elastic_flags("2", "keep_alive_interval=0.3,join_timeout=2"), "--max-restarts", "3")
    agents = [job.start(), job.start()]
    job.wait_for_round(2)
    lose(agents[0])
    assert agents[1].wait() == 1
    assert "1 of at least 2 nodes" in agents[1].stderr


@pytest.mark.parametrize("lost", [0, 1], ids=["the one that hosts the store", "another one"])
def test_a_job_of_numbered_nodes_waits_for_a_lost_node_no_longer_than_join_timeout(
    make_job: MakeJob, lost: int
) -> None:
    job = make_job(*static(2, "keep_alive_interval=0.3,join_timeout=2"), "--max-restarts", "3")
    agents = start_all(job, 2)
    job.wait_for_round(2)
    lose(agents[lost])
    assert agents[1 - lost].wait() == 1


def kill_one(job: Job, starts: Sequence[Start], number: int, then: str) -> None:
    """Kill rank ``number % 2`` of two, once the other one has shown that it is about to run ``then``."""
    killed = number % 2
    job.order(1 - killed, f"print('turn', {number}, flush=True); {then}")
    wait_until(lambda: f"turn {number}\n" in job.output, WITHIN, lambda: job.output)
    os.kill(starts[killed].pid, signal.SIGKILL)


@pytest.mark.parametrize("restarts", [3, pytest.param(20, marks=[SLOW, pytest.mark.timeout(400)])])
@pytest.mark.parametrize(
    "then",
    [pytest.param("pass", marks=SLOW), "dist.all_reduce(total)"],
    ids=["the other computes", "the other waits in a collective"],
)
@pytest.mark.parametrize("elastic_flags", ["c10d"], indirect=True)
def test_a_program_works_again_after_each_of_many_kills_of_a_rank(
    elastic_flags: Any, make_job: MakeJob, restarts: int, then: str
) -> None:
    job = make_job(*elastic_flags("2"), "--max-restarts", str(restarts))
    for _ in range(2):
        job.start()
    for number in range(restarts):
        kill_one(job, job.wait_for_round(2, restarts=number), number, then)
    job.wait_for_round(2, restarts=restarts)
    assert job.finish() == [0, 0]


GLOO = """
    import os, pathlib, signal, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", int(total), "after", os.environ["TORCHELASTIC_RESTART_COUNT"], "restarts", flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.parametrize("attempt", [0, *(pytest.param(number, marks=SLOW) for number in range(1, 20))])
@pytest.mark.parametrize("elastic_flags", ["c10d"], indirect=True)
def test_a_program_of_stock_pytorch_works_again_after_a_rank_was_killed(
    elastic_flags: Any, make_job: MakeJob, attempt: int
) -> None:
    job = make_job(*elastic_flags("2"), "--max-restarts", "3", program=GLOO)
    agents = [job.start(), job.start()]
    assert job.wait(within=90) == [0, 0]
    for rank, agent in enumerate(agents):
        assert "sum 2 after 1 restarts" in agent.stdout, rank
