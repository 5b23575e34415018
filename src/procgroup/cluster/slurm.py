"""Find the meeting point of a Slurm step's tasks, from variables that all of them have.

The first node of the step runs task 0. The port is computed from the numbers of the job and of the step, so jobs and
steps that share a node use different ports. The numbers are public, so the port protects no job from other users.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from procgroup.cluster.host_lists import expand_hosts
from procgroup.types import Endpoint

# Below the ephemeral ports of Linux (from 32768 on).
_FIRST_PORT = 20_000
_PORTS = 12_000
_STEPS_BETWEEN_JOBS = 31
"""The distance between the ports of one job's step 0 and the next job's: jobs run few steps at a time."""


def meeting_point(environment: Mapping[str, str] | None = None) -> Endpoint:
    """Return the host and port at which the tasks of this step meet; loopback where the step has one node.

    Raises ValueError, which names the variable, where one is missing or invalid.
    """
    environment = os.environ if environment is None else environment
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    port = _FIRST_PORT + (job * _STEPS_BETWEEN_JOBS + step) % _PORTS
    if _number(environment, "SLURM_STEP_NUM_NODES") == 1:
        return Endpoint("127.0.0.1", port)
    try:
        return Endpoint(expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))[0], port)
    except ValueError as error:
        raise ValueError(f"SLURM_STEP_NODELIST does not name the step's nodes: {error}") from error


def step_name(environment: Mapping[str, str] | None = None) -> str:
    """Return the name of this step, such as ``slurm 17.0``: stores refuse connections of steps with another name."""
    environment = os.environ if environment is None else environment
    return f"slurm {environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"expected the number that srun sets in {name}, got {text!r}")
    return int(text)
