"""Start the agents of one job on hosts of their own, and the bounds within which they act when a host is lost."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bridged_hosts import Host, Switch
from launch.agents import Agent, Job

PORT = 29400
"""Where the nodes of an elastic job meet when the endpoint names no port."""

RESTARTED = 30
"""Seconds from the death of a host, or the return of one, until all ranks run again: 1 to 3 where nothing else runs."""

CUT = 40
"""Seconds from a cut until both sides of it have done what is to be done: 4 to 8 where nothing else runs."""


def addresses(switch: Switch) -> str:
    return ",".join(host.address for host in switch.hosts)


def start_on(job: Job, hosts: Sequence[Host], *flags: str) -> list[Agent]:
    return [job.start(*flags, inside=host.command) for host in hosts]


def start_one_after_another(job: Job, hosts: Sequence[Host]) -> list[Agent]:
    """Start agents so that the first one hosts the store, and that node ranks are in the order of the hosts."""
    agents: list[Agent] = []
    for host in hosts:
        agents += start_on(job, [host])
        job.wait_for_round(len(agents))
    return agents


def left(deadline: float) -> float:
    return deadline - time.monotonic()
