"""Jobs of several nodes with fixed numbers, agents side by side on one host: how they meet, what ranks see, signals."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import psutil
import pytest

import world
from launch.agents import SOON, WITHIN, Job, is_running, start_all, static, wait_until

MakeJob = Callable[..., Job]

SLOW = pytest.mark.slow

EXPECTED = {
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "3",
    "ROLE_NAME": "trainer",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "numbers",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "2",
}


@pytest.mark.parametrize(
    "order", [pytest.param((0, 1, 2), marks=SLOW), (2, 1, 0), pytest.param((1, 2, 0), marks=SLOW)], ids=str
)
def test_ranks_are_contiguous_in_the_order_of_node_ranks_whoever_starts_first(
    make_job: MakeJob, order: tuple[int, ...]
) -> None:
    job = make_job(*static(3), "--max-restarts", "2", "--rdzv-id", "numbers", "--role", "trainer")
    counts = (1, 2, 1)
    for node in order:
        job.start("--node-rank", str(node), "--nproc-per-node", str(counts[node]))
    starts = job.wait_for_round(4)
    assert job.finish() == [0, 0, 0]
    assert [start.node for start in starts] == [0, 1, 1, 2]
    for start, local_rank in zip(starts, [0, 0, 1, 0], strict=True):
        expected = EXPECTED | {
            "RANK": str(start.rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(counts[start.node]),
            "GROUP_RANK": str(start.node),
            "ROLE_RANK": str(start.rank),
        }
        assert {name: start.environment[name] for name in expected} == expected


def test_the_endpoint_may_say_where_the_nodes_meet(make_job: MakeJob) -> None:
    job = make_job("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{world.free_port()}", "--rdzv-conf", SOON)
    start_all(job, 2)
    job.wait_for_round(2)
    assert job.finish() == [0, 0]


@pytest.mark.parametrize("twice", [0, 1], ids=["the one that hosts the store", "another one"])
def test_a_node_whose_rank_another_one_has_ends_and_names_both(make_job: MakeJob, twice: int) -> None:
    job = make_job(*static(2))
    agents = start_all(job, 2)
    starts = job.wait_for_round(2)
    second = job.start("--node-rank", str(twice))
    assert second.wait() == 1
    assert f"two nodes have --node-rank {twice}" in second.stderr
    for agent in (agents[twice], second):
        assert f"pid {agent.process.pid}" in second.stderr
    assert job.wait_for_round(2) == starts
    assert job.finish() == [0, 0, 1]


@pytest.mark.parametrize("twice", [0, 1], ids=["the one that hosts the store", "another one"])
def test_of_two_nodes_that_wait_with_one_rank_the_earlier_one_goes_on(make_job: MakeJob, twice: int) -> None:
    job = make_job(*static(3))
    agents = [*start_all(job, 2), job.start("--node-rank", str(twice))]
    pair = [agents[twice], agents[2]]
    wait_until(lambda: any(agent.process.poll() is not None for agent in pair), WITHIN, lambda: job.output)
    (refused,) = (agent for agent in pair if agent.process.poll() is not None)
    for agent in pair:
        assert f"pid {agent.process.pid}" in refused.stderr
    job.start("--node-rank", "2")
    job.wait_for_round(3)
    assert sorted(job.finish()) == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("flag", "earlier", "later"), [("--nnodes", "3", "2"), ("--max-restarts", "5", "7")], ids=["nnodes", "max-restarts"]
)
def test_a_node_that_disagrees_with_the_others_ends_and_names_both_values(
    make_job: MakeJob, flag: str, earlier: str, later: str
) -> None:
    job = make_job(*static(3))
    agents = [job.start("--node-rank", "0", flag, earlier), job.start("--node-rank", "1", flag, later)]
    wait_until(lambda: any(agent.process.poll() is not None for agent in agents), WITHIN, lambda: job.output)
    (refused,) = (agent for agent in agents if agent.process.poll() is not None)
    assert refused.wait() == 1
    words = refused.stderr.replace(",", " ").replace(".", " ").split()
    assert {earlier, later} <= set(words)


@pytest.mark.parametrize("node", [0, 1], ids=["the one that hosts the store", "another one"])
def test_nodes_that_do_not_come_are_waited_for_no_longer_than_the_timeout(make_job: MakeJob, node: int) -> None:
    job = make_job(*static(2, f"{SOON},timeout=1"))
    agent = job.start("--node-rank", str(node))
    assert agent.wait() == 1
    waited_for = "1 of at least 2 nodes are here" if node == 0 else "the nodes' store at"
    assert f"the nodes have not come together within 1 s: {waited_for}" in agent.stderr
    assert "(hosted by node 0; --rdzv-id none)" in agent.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=SLOW)], ids=lambda number: number.name
)
def test_a_signal_to_one_agent_ends_all_agents_of_a_job_without_restarts(
    make_job: MakeJob, number: signal.Signals
) -> None:
    job = make_job(*static(2))
    agents = start_all(job, 2)
    job.wait_for_round(2)
    agents[1].signal(number)
    other, signalled = job.wait()
    assert signalled == 128 + number
    assert other != 0


def test_a_signal_reaches_the_children_of_ranks_too(make_job: MakeJob) -> None:
    job = make_job(*static(2))
    agents = start_all(job, 2)
    job.wait_for_round(2)
    child = "import time; print('child is here', flush=True); time.sleep(60)"
    job.order(1, f"import subprocess; subprocess.Popen([sys.executable, '-c', {child!r}])")
    agents[1].wait_for("child is here")
    agents[1].signal(signal.SIGTERM)
    assert job.wait()[1] == 128 + signal.SIGTERM  # and no process of the job is left


def test_a_second_interrupt_kills_ranks_that_ignore_the_first(make_job: MakeJob) -> None:
    job = make_job(*static(2), "--shutdown-timeout", "50")
    agents = start_all(job, 2)
    resisting = job.wait_for_round(2)[0]
    job.order(0, "signal.signal(signal.SIGINT, signal.SIG_IGN); print('resists', flush=True)")
    agents[0].wait_for("resists")
    agents[0].signal(signal.SIGINT)
    agents[0].wait_for("SIGINT: ending")
    agents[0].signal(signal.SIGINT)
    wait_until(lambda: not is_running(resisting.pid), WITHIN, lambda: job.output)  # and not after 50 s
    assert job.wait()[0] == 128 + signal.SIGINT


def test_ranks_that_ignore_an_interrupt_have_two_seconds(make_job: MakeJob) -> None:
    job = make_job(*static(2))
    agents = start_all(job, 2)
    job.wait_for_round(2)
    job.order(1, "signal.signal(signal.SIGINT, signal.SIG_IGN); print('resists', flush=True)")
    agents[1].wait_for("resists")
    agents[1].signal(signal.SIGINT)
    assert job.wait()[1] == 128 + signal.SIGINT


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=SLOW)], ids=lambda number: number.name
)
def test_user_signals_reach_the_ranks_and_end_nothing(make_job: MakeJob, number: signal.Signals) -> None:
    job = make_job(*static(2), "--nproc-per-node", "2")
    agents = start_all(job, 2)
    starts = job.wait_for_round(4)
    for start in starts:
        job.order(start.rank, f"signal.signal({number}, lambda *_: print('got it', rank, flush=True)); print('ready')")
        agents[start.node].wait_for(f"[rank {start.rank} {socket.gethostname()}] ready")
    agents[1].signal(number)
    for rank in (2, 3):
        agents[1].wait_for(f"got it {rank}")
    assert job.wait_for_round(4) == starts
    assert job.finish() == [0, 0]


def test_an_agent_takes_less_than_40_megabytes(make_job: MakeJob) -> None:
    job = make_job(*static(2), "--nproc-per-node", "2")
    agents = start_all(job, 2)
    job.wait_for_round(4)
    for agent in agents:
        assert psutil.Process(agent.process.pid).memory_info().rss < 40e6
    assert job.finish() == [0, 0]
