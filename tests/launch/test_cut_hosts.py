"""A host that is cut off and joins again, over and over: what its agent and the others hold afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import two_hosts
from bridged_hosts import Switch
from launch.agents import Agent, Job, elastic, wait_until
from launch.hosts import CUT, RESTARTED, addresses, start_on

MakeJob = Callable[..., Job]

pytestmark = pytest.mark.skipif(bool(lack := two_hosts.lacks()), reason=lack)


def cut_off_and_heal(switch: Switch, job: Job, agents: list[Agent], lost: int) -> None:
    """Cut a host off until the others run without it and it has ended its ranks; then wait until all run again."""
    before = job.wait_for_round(3)
    others = [agent for agent in agents if agent is not agents[lost]]
    switch.cut(switch.hosts[lost])
    without = job.wait_for_round(2, after=before, agents=others, within=CUT)
    wait_until(lambda: not agents[lost].running(), CUT, lambda: job.output)
    switch.heal(switch.hosts[lost])
    job.wait_for_round(3, after=[*before, *without], within=RESTARTED)


def expect_no_more(agent: Agent, before: dict[str, int]) -> None:
    """Wait until an agent holds no more of anything than before; connections may still be about to close."""

    def is_so() -> bool:
        return all(number <= before[name] for name, number in agent.held().items())

    wait_until(is_so, 5, lambda: f"{before} at first, then {agent.held()}")


@pytest.mark.timeout(150)
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
    first = [agent.held() for agent in agents]
    for _ in range(times - 1):
        cut_off_and_heal(switch, job, agents, lost)
    for agent, before in zip(agents, first, strict=True):
        expect_no_more(agent, before)
    assert job.finish() == [0, 0, 0]
