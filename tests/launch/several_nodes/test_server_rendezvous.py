"""Agents that meet at a server of etcd or Redis on a host of its own: a host that dies, or is cut off from all."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import database_servers
import two_hosts
from bridged_hosts import Host, Switch, connected, kill_all
from launch.agents import SOON, Agent, Job, elastic, wait_until
from launch.hosts import CUT, RESTARTED, left, start_on

MakeJob = Callable[..., Job]
ServerFlags = Callable[[str, str], list[str]]

SLOW = pytest.mark.slow
SERVERS = {"etcd": database_servers.etcd_on, "redis": database_servers.redis_on}
LACKS = {"etcd": database_servers.lacks_etcd(), "redis": database_servers.lacks_redis()}
NEEDED = {name: pytest.mark.skipif(bool(lack), reason=lack) for name, lack in LACKS.items()}
LEASES = pytest.mark.parametrize(
    "conf", [SOON, pytest.param("last_call_timeout=1", marks=SLOW)], ids=["short lease", "default lease"]
)
LOST = pytest.mark.parametrize("lost", [pytest.param(0, marks=SLOW), 2], ids=["host of the ranks' store", "other host"])

pytestmark = pytest.mark.skipif(bool(lack := two_hosts.lacks()), reason=lack)


@pytest.fixture
def switch() -> Iterator[Switch]:
    """Three hosts for agents, and one for the server."""
    with connected(4) as made:
        yield made


@pytest.fixture(
    params=[pytest.param("etcd", marks=NEEDED["etcd"]), pytest.param("redis", marks=[NEEDED["redis"], SLOW])]
)
def server_flags(request: pytest.FixtureRequest, switch: Switch, tmp_path: Path) -> Iterator[ServerFlags]:
    """Return the flags of an elastic job whose agents meet at the server; the parameter is the back-end."""
    host, port = switch.hosts[3], 2379
    folder = tmp_path / "server"
    folder.mkdir()
    with SERVERS[request.param](host, folder, port):
        yield lambda nodes, conf: elastic(nodes, f"{host.address}:{port}", request.param, conf)


def start_in_any_order(job: Job, switch: Switch) -> tuple[list[Agent], list[Host]]:
    """Start all agents at once; return them and their hosts in the order of the node ranks that they got."""
    hosts = dict(zip(start_on(job, switch.hosts[:3]), switch.hosts, strict=False))
    job.wait_for_round(3, restarts=0)
    agents = sorted(hosts, key=lambda agent: agent.running()[0].node)
    return agents, [hosts[agent] for agent in agents]


@SLOW
@LEASES
@LOST
def test_when_a_host_dies_the_others_run_again_and_it_may_come_back(
    switch: Switch, server_flags: ServerFlags, make_job: MakeJob, lost: int, conf: str
) -> None:
    job = make_job(*server_flags("2:3", conf), "--max-restarts", "3")
    agents, hosts = start_in_any_order(job, switch)
    starts = job.wait_for_round(3)
    others = [agent for agent in agents if agent is not agents[lost]]
    deadline = time.monotonic() + RESTARTED
    kill_all(hosts[lost])
    starts = job.wait_for_round(2, restarts=1, after=starts, agents=others, within=left(deadline))
    start_on(job, [hosts[lost]])
    job.wait_for_round(3, restarts=1, after=starts, within=RESTARTED)
    assert sorted(job.finish()) == [-signal.SIGKILL, 0, 0, 0]


@LEASES
@LOST
def test_when_a_host_is_cut_off_from_all_the_others_run_again_and_it_ends_its_own_ranks_and_joins_again_later(
    switch: Switch, server_flags: ServerFlags, make_job: MakeJob, lost: int, conf: str
) -> None:
    job = make_job(*server_flags("2:3", conf), "--max-restarts", "3")
    agents, hosts = start_in_any_order(job, switch)
    starts = job.wait_for_round(3)
    others = [agent for agent in agents if agent is not agents[lost]]
    deadline = time.monotonic() + CUT
    switch.cut(hosts[lost])
    starts = job.wait_for_round(2, restarts=1, after=starts, agents=others, within=left(deadline))
    wait_until(lambda: not agents[lost].running(), left(deadline), lambda: job.output)
    switch.heal(hosts[lost])
    job.wait_for_round(3, restarts=1, after=starts, within=RESTARTED)
    assert job.finish() == [0, 0, 0]
