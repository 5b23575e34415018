"""Agents whose store is an etcd cluster with a member on each host, or Redis on one of them, when hosts are lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import database_servers
import two_hosts
from bridged_hosts import Host, Switch, kill_all
from launch.agents import Agent, Job, Start, elastic, one_world_at_a_time, wait_until
from launch.etcd_cluster import EtcdCluster, running_on
from launch.hosts import left, start_on

MakeJob = Callable[..., Job]

SLOW = pytest.mark.slow
CONF = "last_call_timeout=1"
LACKS = two_hosts.lacks() or database_servers.lacks_etcd()
NEEDS_REDIS = pytest.mark.skipif(bool(lack := database_servers.lacks_redis()), reason=lack)
ORDERS = pytest.mark.parametrize(
    "own_first", [True, pytest.param(False, marks=SLOW)], ids=["own member first", "leader first"]
)
ENDED = 20
"""Seconds in which an agent has ended its ranks after the store's last answer: 3 to 4.4 where nothing else runs."""

RUNS_AGAIN = 30
"""Seconds in which a round follows a loss: 5 to 8 where nothing else runs."""

pytestmark = [pytest.mark.skipif(bool(LACKS), reason=LACKS)]


@pytest.fixture
def cluster(switch: Switch, tmp_path: Path) -> Iterator[EtcdCluster]:
    with running_on(switch.hosts, tmp_path / "etcd") as made:
        yield made


def start_at(
    cluster: EtcdCluster, make_job: MakeJob, restarts: int, *, own_first: bool
) -> tuple[Job, dict[Host, Agent]]:
    """Start an agent on each host, and return the job and the agents of the hosts once all ranks run."""
    leader = cluster.wait_for_leader()
    job = make_job(*elastic("2:3", cluster.endpoints(leader), "etcd", CONF), "--max-restarts", str(restarts))
    agents = {host: start_member(job, cluster, host, host if own_first else leader) for host in cluster.hosts}
    job.wait_for_round(3, restarts=0)
    return job, agents


def start_member(job: Job, cluster: EtcdCluster, host: Host, first: Host) -> Agent:
    return job.start("--rdzv-endpoint", cluster.endpoints(first), inside=host.command)


def stay(job: Job, starts: list[Start], seconds: float) -> None:
    """Expect that the same ranks run for a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert {start.pid for agent in job.agents for start in agent.running()} == {start.pid for start in starts}
        time.sleep(0.1)


@SLOW
@ORDERS
def test_when_the_leader_s_host_dies_with_all_that_is_there_the_others_run_again_and_it_may_come_back(
    cluster: EtcdCluster, make_job: MakeJob, own_first: bool
) -> None:
    job, agents = start_at(cluster, make_job, 2, own_first=own_first)
    starts, lost = job.wait_for_round(3), cluster.wait_for_leader()
    others = [agent for host, agent in agents.items() if host != lost]
    with one_world_at_a_time(job):
        deadline = time.monotonic() + RUNS_AGAIN
        kill_all(lost)
        without = job.wait_for_round(2, restarts=1, after=starts, agents=others, within=left(deadline))
        cluster.start(lost)
        start_member(job, cluster, lost, lost)
        job.wait_for_round(3, restarts=1, after=without, within=RUNS_AGAIN)
        assert sorted(job.finish()) == [-signal.SIGKILL, 0, 0, 0]


@ORDERS
def test_when_the_leader_s_host_is_cut_off_only_one_world_is_at_work_at_a_time_and_the_host_joins_again_later(
    cluster: EtcdCluster, switch: Switch, make_job: MakeJob, own_first: bool
) -> None:
    job, agents = start_at(cluster, make_job, 2, own_first=own_first)
    starts, lost = job.wait_for_round(3), cluster.wait_for_leader()
    others = [agent for host, agent in agents.items() if host != lost]
    with one_world_at_a_time(job):
        deadline = time.monotonic() + RUNS_AGAIN
        switch.cut(lost)
        without = job.wait_for_round(2, restarts=1, after=starts, agents=others, within=left(deadline))
        wait_until(lambda: not agents[lost].running(), left(deadline), lambda: job.output)
        switch.heal(lost)
        job.wait_for_round(3, after=[*starts, *without], within=RUNS_AGAIN)
        assert job.finish() == [0, 0, 0]


@SLOW
@ORDERS
def test_when_the_leader_s_member_ends_or_all_members_stop_for_3_s_nothing_happens(
    cluster: EtcdCluster, make_job: MakeJob, own_first: bool
) -> None:
    job, _ = start_at(cluster, make_job, 1, own_first=own_first)
    starts = job.wait_for_round(3)
    cluster.signal(signal.SIGSTOP)
    stay(job, starts, 3)
    cluster.signal(signal.SIGCONT)
    stay(job, starts, 8)
    cluster.members[cluster.wait_for_leader()].kill()
    stay(job, starts, 8)
    assert job.finish() == [0, 0, 0]


@SLOW
def test_when_all_members_stop_for_30_s_the_ranks_end_and_run_again_afterwards_and_that_counts_once(
    cluster: EtcdCluster, make_job: MakeJob
) -> None:
    job, agents = start_at(cluster, make_job, 1, own_first=False)
    starts = job.wait_for_round(3)
    deadline = time.monotonic() + 30
    cluster.signal(signal.SIGSTOP)
    for agent in agents.values():
        agent.wait_for("the agents' store at the server 192.168.79.", within=ENDED)
    wait_until(lambda: not any(agent.running() for agent in job.agents), ENDED, lambda: job.output)
    time.sleep(left(deadline))
    cluster.signal(signal.SIGCONT)
    job.wait_for_round(3, restarts=1, after=starts, within=RUNS_AGAIN)
    assert job.finish() == [0, 0, 0]


@SLOW
def test_when_all_members_stop_and_no_restart_is_left_every_agent_says_so_and_ends(
    cluster: EtcdCluster, make_job: MakeJob
) -> None:
    job, agents = start_at(cluster, make_job, 0, own_first=True)
    cluster.signal(signal.SIGSTOP)
    assert job.wait(within=ENDED) == [1, 1, 1]
    for agent in agents.values():
        assert "the agents' store at the server 192.168.79." in agent.stderr
        assert "no restart is left" in agent.stderr


@pytest.fixture
def redis(switch: Switch, tmp_path: Path) -> Iterator[str]:
    """Run a server on the last host; return its endpoint."""
    host, port = switch.hosts[-1], 6379
    (tmp_path / "redis").mkdir()
    with database_servers.redis_on(host, tmp_path / "redis", port):
        yield f"{host.address}:{port}"


@SLOW
@NEEDS_REDIS
@pytest.mark.parametrize(
    ("restarts", "within", "last"),
    [
        (0, ENDED, "no restart is left"),
        (1, ENDED + 3, "within 3 s: the nodes' store at the server {} (--rdzv-id test) is not reached"),
    ],
    ids=["no restart", "join_timeout"],
)
def test_when_the_host_of_redis_dies_every_other_agent_says_so_and_ends(
    switch: Switch, redis: str, make_job: MakeJob, restarts: int, within: float, last: str
) -> None:
    job = make_job(*elastic("2:3", redis, "redis", f"{CONF},join_timeout=3"), "--max-restarts", str(restarts))
    agents = start_on(job, switch.hosts)
    job.wait_for_round(3, restarts=0)
    kill_all(switch.hosts[-1])
    assert job.wait(within) == [1, 1, -signal.SIGKILL]
    for agent in agents[:-1]:
        assert f"the agents' store at the server {redis} (--rdzv-id test) has been silent for" in agent.stderr
        assert last.format(redis) in agent.stderr
