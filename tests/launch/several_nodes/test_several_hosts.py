"""Jobs of several hosts, as network namespaces: names and addresses, cut cables, hosts that die, clocks that differ."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import two_hosts
from bridged_hosts import Host, Switch, kill_all
from launch.agents import SOON, Agent, Job, elastic, is_running, lose, wait_until
from launch.hosts import CUT, PORT, RESTARTED, addresses, left, start_on, start_one_after_another

MakeJob = Callable[..., Job]
Inside = Callable[[Sequence[str]], list[str]]

LEASES = pytest.mark.parametrize(
    "conf", [SOON, pytest.param("last_call_timeout=1", marks=pytest.mark.slow)], ids=["short lease", "default lease"]
)

pytestmark = pytest.mark.skipif(bool(lack := two_hosts.lacks()), reason=lack)


@pytest.mark.parametrize("order", [(1, 0), pytest.param((0, 1), marks=pytest.mark.slow)], ids=str)
def test_nodes_numbered_by_hand_meet_whoever_starts_first(
    switch: Switch, make_job: MakeJob, order: tuple[int, ...]
) -> None:
    flags = ("--nnodes", "2", "--master-addr", switch.hosts[0].address, "--master-port", str(PORT))
    job = make_job(*flags, "--nproc-per-node", "2")
    for node in order:
        job.start("--node-rank", str(node), inside=switch.hosts[node].command)
    assert [start.node for start in job.wait_for_round(4)] == [0, 0, 1, 1]
    assert job.finish() == [0, 0]


@pytest.mark.parametrize("order", [(1, 0), pytest.param((0, 1), marks=pytest.mark.slow)], ids=str)
def test_the_endpoint_may_be_a_name_that_leads_its_own_host_to_127_0_1_1(
    switch: Switch, make_job: MakeJob, tmp_path: Path, order: tuple[int, ...]
) -> None:
    job = make_job(*elastic("2", "head"))
    for node in order:
        job.start(inside=named(switch, node, tmp_path))
    job.wait_for_round(2)
    assert job.finish() == [0, 0]


def named(switch: Switch, node: int, directory: Path) -> Inside:
    """Run commands where the host has a name, head or worker, that leads to 127.0.1.1 on the host itself only."""
    names = ("head", "worker")
    lines = ["127.0.0.1 localhost"]
    for number, name in enumerate(names):
        lines.append(f"{'127.0.1.1' if number == node else switch.hosts[number].address} {name}")
    table = directory / f"hosts-{node}"
    table.write_text("\n".join(lines) + "\n")
    script = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
    apart = ["unshare", "--uts", "--mount", "sh", "-ec", script, names[node], str(table)]
    return lambda command: switch.hosts[node].command([*apart, *command])


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_job_with_several_endpoints_starts_whichever_node_is_there_first(
    switch: Switch, make_job: MakeJob, first: int
) -> None:
    job = make_job(*elastic("3", addresses(switch)))
    hosts = [switch.hosts[first], *(host for host in switch.hosts if host is not switch.hosts[first])]
    start_on(job, hosts)
    job.wait_for_round(3)
    assert job.finish() == [0, 0, 0]


def test_when_the_host_of_the_store_dies_the_next_endpoint_takes_over_and_the_host_may_come_back(
    switch: Switch, make_job: MakeJob
) -> None:
    job = make_job(*elastic("2:3", addresses(switch)), "--max-restarts", "3")
    agents = start_on(job, switch.hosts)
    starts = job.wait_for_round(3, restarts=0)
    began = time.monotonic()
    kill_all(switch.hosts[0])
    starts = job.wait_for_round(2, restarts=1, after=starts, agents=agents[1:], within=left(began + RESTARTED))
    agents += start_on(job, switch.hosts[:1])
    job.wait_for_round(3, restarts=1, after=starts, within=RESTARTED)
    assert job.finish() == [-signal.SIGKILL, 0, 0, 0]


def test_the_store_moves_on_as_often_as_its_host_is_lost(switch: Switch, make_job: MakeJob) -> None:
    job = make_job(*elastic("1:3", addresses(switch)), "--max-restarts", "3")
    agents = start_one_after_another(job, switch.hosts)
    starts = job.wait_for_round(3)
    for restarts in (1, 2):
        deadline = time.monotonic() + RESTARTED
        kill_all(switch.hosts[restarts - 1])
        others = agents[restarts:]
        starts = job.wait_for_round(3 - restarts, restarts=restarts, after=starts, agents=others, within=left(deadline))
        assert [agent.running()[0].node for agent in others] == list(range(len(others)))
    assert job.finish() == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_when_the_agent_that_hosts_the_store_gets_a_signal_the_others_go_on_at_the_next_endpoint(
    switch: Switch, make_job: MakeJob
) -> None:
    job = make_job(*elastic("1:3", addresses(switch)))
    agents = start_one_after_another(job, switch.hosts)
    starts = job.wait_for_round(3)
    agents[0].signal(signal.SIGTERM)
    job.wait_for_round(2, restarts=0, after=starts, agents=agents[1:], within=RESTARTED)
    assert job.finish() == [128 + signal.SIGTERM, 0, 0]


@LEASES
@pytest.mark.parametrize("lost", [0, 2], ids=["host of the store", "other host"])
def test_when_a_host_is_cut_off_the_others_run_again_and_it_ends_its_own_ranks_and_joins_again_later(
    switch: Switch, make_job: MakeJob, lost: int, conf: str
) -> None:
    job = make_job(*elastic("2:3", addresses(switch), conf=conf), "--max-restarts", "3")
    agents = start_on(job, switch.hosts)
    starts = job.wait_for_round(3, restarts=0)
    others = [agent for agent in agents if agent is not agents[lost]]
    deadline = time.monotonic() + CUT
    switch.cut(switch.hosts[lost])
    starts = job.wait_for_round(2, restarts=1, after=starts, agents=others, within=left(deadline))
    wait_until(lambda: not agents[lost].running(), left(deadline), lambda: job.output)
    switch.heal(switch.hosts[lost])
    job.wait_for_round(3, restarts=1, after=starts, within=RESTARTED)
    assert job.finish() == [0, 0, 0]


@LEASES
@pytest.mark.parametrize("lost", [0, 2], ids=["host of the store", "other host"])
def test_ranks_that_are_cut_off_and_ignore_sigterm_have_been_killed_when_the_others_run_again(
    switch: Switch, make_job: MakeJob, lost: int, conf: str
) -> None:
    job = make_job(*elastic("2:3", addresses(switch), conf=conf), "--max-restarts", "3")
    agents = start_on(job, switch.hosts)
    starts = job.wait_for_round(3, restarts=0)
    others = [agent for agent in agents if agent is not agents[lost]]
    (resisting,) = agents[lost].running()
    job.order(resisting.rank, "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('resists', flush=True)")
    agents[lost].wait_for("resists")
    switch.cut(switch.hosts[lost])
    starts = job.wait_for_round(2, restarts=1, after=starts, agents=others, within=CUT)
    assert not is_running(resisting.pid), job.output
    assert "silent for" in agents[lost].stderr, "why its ranks were ended is said"
    switch.heal(switch.hosts[lost])
    job.wait_for_round(3, restarts=1, after=starts, within=RESTARTED)
    assert job.finish() == [0, 0, 0]


@LEASES
def test_a_host_that_loses_its_power_is_lost_like_one_that_is_cut_off(
    switch: Switch, make_job: MakeJob, conf: str
) -> None:
    job = make_job(*elastic("2:3", addresses(switch), conf=conf), "--max-restarts", "3")
    agents = start_on(job, switch.hosts)
    starts = job.wait_for_round(3, restarts=0)
    deadline = time.monotonic() + CUT
    switch.cut(switch.hosts[0])
    kill_all(switch.hosts[0])
    job.wait_for_round(2, restarts=1, after=starts, agents=agents[1:], within=left(deadline))
    assert job.finish() == [-signal.SIGKILL, 0, 0]


def test_with_one_endpoint_the_others_run_again_when_a_host_is_cut_off_that_does_not_have_it(
    switch: Switch, make_job: MakeJob
) -> None:
    job = make_job(*elastic("2:3", switch.hosts[0].address), "--max-restarts", "3")
    agents = start_on(job, switch.hosts)
    starts = job.wait_for_round(3, restarts=0)
    deadline = time.monotonic() + CUT
    switch.cut(switch.hosts[1])
    starts = job.wait_for_round(2, restarts=1, after=starts, agents=agents[::2], within=left(deadline))
    wait_until(lambda: not agents[1].running(), left(deadline), lambda: job.output)
    switch.heal(switch.hosts[1])
    job.wait_for_round(3, restarts=1, after=starts, within=RESTARTED)
    assert job.finish() == [0, 0, 0]


def test_of_two_halves_the_one_with_the_store_goes_on(switch: Switch, make_job: MakeJob) -> None:
    job = make_job(*elastic("1:2", switch.hosts[0].address), "--max-restarts", "3")
    agents = start_one_after_another(job, switch.hosts[:2])
    starts = job.wait_for_round(2)
    deadline = time.monotonic() + CUT
    switch.cut(switch.hosts[1])
    starts = job.wait_for_round(1, restarts=1, after=starts, agents=agents[:1], within=left(deadline))
    wait_until(lambda: not agents[1].running(), left(deadline), lambda: job.output)
    switch.heal(switch.hosts[1])
    job.wait_for_round(2, restarts=1, after=starts, within=RESTARTED)
    assert job.finish() == [0, 0]


def test_of_two_halves_neither_goes_on_where_a_partition_is_to_stop_them(switch: Switch, make_job: MakeJob) -> None:
    job = make_job(*elastic("1:2", switch.hosts[0].address), "--max-restarts", "3", "--on-partition", "stop")
    agents = start_one_after_another(job, switch.hosts[:2])
    starts = job.wait_for_round(2)
    started = [len(agent.starts()) for agent in agents]
    deadline = time.monotonic() + CUT
    switch.cut(switch.hosts[1])
    for agent in agents:
        wait_until(lambda agent=agent: not agent.running(), left(deadline), lambda: job.output)
    agents[0].wait_for("1 of the 2 nodes of the last round are here", left(deadline))
    assert [len(agent.starts()) for agent in agents] == started
    switch.heal(switch.hosts[1])
    job.wait_for_round(2, after=starts, within=RESTARTED)
    assert job.finish() == [0, 0]


CLOCK = """
import time
real = time.time
time.time = lambda: real() + {shift}
"""


def with_other_clocks(job: Job, host: Host, hours: int, directory: Path) -> Agent:
    """Start an agent on a host whose wall clock and whose time since its start differ from those of other hosts."""
    folder = directory / f"clock-{hours}"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK.format(shift=3600 * hours))
    script = f'PYTHONPATH="{folder}:$PYTHONPATH" exec "$@"'
    shift = ["unshare", "--time", "--monotonic", str(3600 * hours), "--boottime", str(3600 * hours)]
    return job.start(inside=lambda command: host.command([*shift, "sh", "-c", script, "sh", *command]))


def test_hosts_whose_clocks_differ_meet_and_find_lost_nodes(switch: Switch, make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(*elastic("2:3", addresses(switch)), "--max-restarts", "3")
    hours = (0, 1000, 2)
    agents = [with_other_clocks(job, host, *shift, tmp_path) for host, *shift in zip(switch.hosts, hours, strict=True)]
    starts = job.wait_for_round(3, restarts=0)
    deadline = lose(agents[1])
    starts = job.wait_for_round(2, restarts=1, after=starts, agents=agents[::2], within=left(deadline))
    agents.append(job.start(inside=switch.hosts[1].command))
    job.wait_for_round(3, restarts=1, after=starts, within=RESTARTED)
    assert job.finish() == [0, -signal.SIGKILL, 0, 0]


def test_hosts_whose_clocks_differ_agree_which_rank_failed_first(
    switch: Switch, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(*elastic("3", addresses(switch)))
    hours = (0, 1000, 2)
    agents = [with_other_clocks(job, host, *shift, tmp_path) for host, *shift in zip(switch.hosts, hours, strict=True)]
    job.wait_for_round(3)
    fast = agents[1].running()[0].rank
    for rank in {0, 1, 2} - {fast}:
        job.order(rank, "dist.barrier()")  # raises, too, when the other rank has failed
    job.order(fast, "raise ValueError('boom')")
    assert job.wait() == [1, 1, 1]
    for agent in agents:
        assert f"rank {fast} (" in agent.stderr
        assert agent.stderr.splitlines()[-1] == "ValueError: boom"


def cut_off_and_heal(switch: Switch, job: Job, agents: list[Agent], lost: int) -> None:
    """Cut a host off until the others run without it and it has ended its ranks; then wait until all run again."""
    before = job.wait_for_round(3)
    others = [agent for agent in agents if agent is not agents[lost]]
    switch.cut(switch.hosts[lost])
    without = job.wait_for_round(2, after=before, agents=others, within=CUT)
    wait_until(lambda: not agents[lost].running(), CUT, lambda: job.output)
    switch.heal(switch.hosts[lost])
    job.wait_for_round(3, after=[*before, *without], within=RESTARTED)


def held_at_most(agent: Agent) -> dict[str, int]:
    """Return the most of each thing that an agent holds in a second: it may be about to connect again."""
    most = agent.held()
    for _ in range(10):
        time.sleep(0.1)
        most = {name: max(number, most[name]) for name, number in agent.held().items()}
    return most


def expect_no_more(agent: Agent, before: dict[str, int]) -> None:
    """Wait until an agent holds no more of anything than before; connections may still be about to close."""

    def is_so() -> bool:
        return all(number <= before[name] for name, number in agent.held().items())

    wait_until(is_so, RESTARTED, lambda: f"{before} at first, then {agent.held()}")


@pytest.mark.parametrize("times", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "lost", [pytest.param(0, marks=pytest.mark.slow), 2], ids=["first host of the store", "other host"]
)
def test_an_agent_that_is_cut_off_and_joins_again_holds_no_more_than_after_the_first_time(
    switch: Switch, make_job: MakeJob, lost: int, times: int
) -> None:
    job = make_job(*elastic("2:3", addresses(switch)), "--max-restarts", str(times))
    agents = start_on(job, switch.hosts)
    cut_off_and_heal(switch, job, agents, lost)
    first = [held_at_most(agent) for agent in agents]
    for _ in range(times - 1):
        cut_off_and_heal(switch, job, agents, lost)
    for agent, before in zip(agents, first, strict=True):
        expect_no_more(agent, before)
    assert job.finish() == [0, 0, 0]
