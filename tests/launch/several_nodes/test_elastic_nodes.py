"""Nodes that come and go in an elastic job whose agents run side by side on one host."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.agents import Agent, Job, lose

MakeJob = Callable[..., Job]

SLOW = pytest.mark.slow
EACH = pytest.mark.parametrize("elastic_flags", ["c10d", "file"], indirect=True)
C10D = pytest.mark.parametrize("elastic_flags", ["c10d", pytest.param("file", marks=SLOW)], indirect=True)


def node_of(agent: Agent) -> int:
    return agent.running()[0].node


@EACH
def test_a_job_begins_at_once_when_all_nodes_are_there(elastic_flags: Any, make_job: MakeJob) -> None:
    job = make_job(*elastic_flags("1:2", "last_call_timeout=300"))
    job.start("--nproc-per-node", "2")
    job.start()
    starts = job.wait_for_round(3)
    assert {start.environment["TORCHELASTIC_RUN_ID"] for start in starts} == {"test"}
    assert job.finish() == [0, 0]


@C10D
def test_a_job_begins_with_fewer_nodes_after_the_last_call(elastic_flags: Any, make_job: MakeJob) -> None:
    job = make_job(*elastic_flags("2:3", "last_call_timeout=1.5"))
    began = time.monotonic()
    for _ in range(2):
        job.start()
    job.wait_for_round(2)
    assert time.monotonic() - began > 1.5
    assert job.finish() == [0, 0]


@C10D
def test_nodes_that_do_not_come_are_waited_for_no_longer_than_join_timeout(
    elastic_flags: Any, make_job: MakeJob
) -> None:
    job = make_job(*elastic_flags("2", "join_timeout=1"))
    agent = job.start()
    assert agent.wait() == 1
    assert "1 of at least 2 nodes" in agent.stderr


@EACH
def test_a_node_that_comes_later_makes_the_world_larger_and_counts_as_no_restart(
    elastic_flags: Any, make_job: MakeJob
) -> None:
    job = make_job(*elastic_flags("1:3"))
    agents = [job.start("--nproc-per-node", "2")]
    starts = job.wait_for_round(2, restarts=0)
    for size in (3, 4):
        agents.append(job.start())
        starts = job.wait_for_round(size, restarts=0, after=starts)
        assert [node_of(agent) for agent in agents] == list(range(len(agents)))
    assert job.finish() == [0, 0, 0]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["in order", "killed"])
@C10D
def test_a_node_beyond_the_most_takes_the_place_of_one_that_goes(
    elastic_flags: Any, make_job: MakeJob, end: signal.Signals
) -> None:
    job = make_job(*elastic_flags("1:2"), "--max-restarts", "3")
    staying = job.start()
    job.wait_for_round(1)
    leaving = job.start()
    starts = job.wait_for_round(2)
    spare = job.start()
    leaving.signal(end)
    lost = int(end == signal.SIGKILL)
    job.wait_for_round(2, restarts=lost, after=starts, agents=[staying, spare])
    assert [node_of(staying), node_of(spare)] == [0, 1]
    assert job.finish() == [0, -end if lost else 128 + end, 0]


@C10D
def test_a_node_beyond_the_most_says_that_it_waits_and_disturbs_nothing(elastic_flags: Any, make_job: MakeJob) -> None:
    job = make_job(*elastic_flags("1:1"))
    job.start()
    starts = job.wait_for_round(1)
    spare = job.start()
    spare.wait_for("spare")
    assert job.wait_for_round(1) == starts
    assert job.finish() == [0, 0]


@pytest.mark.parametrize("lost", [0, 1, 2])
@C10D
def test_the_other_nodes_run_again_when_an_agent_is_killed(elastic_flags: Any, make_job: MakeJob, lost: int) -> None:
    job = make_job(*elastic_flags("1:3"), "--max-restarts", "2")
    agents = [job.start() for _ in range(3)]
    starts = job.wait_for_round(3, restarts=0)
    left = [agent for agent in agents if agent is not agents[lost]]
    deadline = lose(agents[lost])
    job.wait_for_round(2, restarts=1, after=starts, agents=left, within=deadline - time.monotonic())
    assert sorted(job.finish()) == [-signal.SIGKILL, 0, 0]


@pytest.mark.parametrize("lost", [0, 1], ids=["the first", "the second"])
@C10D
def test_the_other_nodes_keep_their_order_and_say_which_restart_it_is_when_an_agent_is_killed(
    elastic_flags: Any, make_job: MakeJob, lost: int
) -> None:
    job = make_job(*elastic_flags("1:3"), "--max-restarts", "2")
    agents = [job.start()]
    job.wait_for_round(1)
    agents += [job.start(), job.start()]
    starts = job.wait_for_round(3)
    agents.sort(key=node_of)
    left = [agent for agent in agents if agent is not agents[lost]]
    agents[lost].process.kill()
    job.wait_for_round(2, restarts=1, after=starts, agents=left)
    assert [node_of(agent) for agent in left] == [0, 1]
    assert [agent.stderr.count("; restart 1 of 2") for agent in left] == [1, 1], job.output
    job.finish()


@pytest.mark.parametrize("lost", [0, 1])
@C10D
def test_a_job_without_a_restart_left_ends_when_an_agent_is_killed(
    elastic_flags: Any, make_job: MakeJob, lost: int
) -> None:
    job = make_job(*elastic_flags("1:2"))
    agents = [job.start(), job.start()]
    job.wait_for_round(2)
    agents.sort(key=node_of)
    deadline = lose(agents[lost])
    assert agents[1 - lost].wait(deadline - time.monotonic()) == 1
    assert f"{socket.gethostname()} (agent's pid {agents[lost].process.pid}) was lost" in agents[1 - lost].stderr


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW), pytest.param(signal.SIGHUP, marks=SLOW)],
    ids=lambda number: number.name,
)
@pytest.mark.parametrize("signalled", [0, 1], ids=["the first", "the second"])
@C10D
def test_a_job_goes_on_without_an_agent_that_got_a_signal(
    elastic_flags: Any, make_job: MakeJob, signalled: int, number: signal.Signals
) -> None:
    job = make_job(*elastic_flags("1:2"))
    agents = [job.start()]
    job.wait_for_round(1)
    agents.append(job.start())
    starts = job.wait_for_round(2)
    agents[signalled].signal(number)
    job.wait_for_round(1, restarts=0, after=starts, agents=[agents[1 - signalled]])
    assert agents[signalled].wait() == 128 + number
    assert sorted(job.finish()) == [0, 128 + number]


@pytest.mark.parametrize("cycles", [5, pytest.param(50, marks=[SLOW, pytest.mark.timeout(600)])])
@C10D
def test_nodes_that_are_killed_and_come_back_leave_nothing_behind(
    elastic_flags: Any, make_job: MakeJob, tmp_path: Path, cycles: int
) -> None:
    shared_memory = set(Path("/dev/shm").glob("*procgroup*"))
    job = make_job(*elastic_flags("1:2"), "--max-restarts", str(cycles + 1))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary)}
    staying = job.start(environment=environment)
    starts = job.wait_for_round(1)
    held: list[dict[str, int]] = []
    for restarts in range(cycles + 1):
        killed = job.start(environment=environment)
        starts = job.wait_for_round(2, restarts=restarts, after=starts, agents=[staying, killed])
        held.append(staying.held())
        deadline = lose(killed)
        within = deadline - time.monotonic()
        starts = job.wait_for_round(1, restarts=restarts + 1, after=starts, agents=[staying], within=within)
    assert job.finish()[0] == 0
    # A connection more or less is one that is just being made; what each cycle leaves would grow with their number.
    assert all(held[-1][name] - held[1][name] < cycles / 2 for name in held[1]), held
    assert not list(temporary.iterdir())
    assert set(Path("/dev/shm").glob("*procgroup*")) <= shared_memory
