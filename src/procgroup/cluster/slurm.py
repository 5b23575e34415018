"""The meeting point of a Slurm step's tasks, from variables that all of them have, and Slurm's lists of host names.

The first node of the step runs task 0. The port is computed from the numbers of the job and of the step, so jobs and
steps that share a node use different ports. The numbers are public, so the port protects no job from other users.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping

from procgroup.types import Endpoint

# Below the ephemeral ports of Linux (from 32768 on).
_FIRST_PORT = 20_000
_PORTS = 12_000
_STEPS_BETWEEN_JOBS = 31
"""The distance between the ports of one job's step 0 and the next job's: jobs run few steps at a time."""
_MAX_HOSTS = 1_000_000
_NAME = r"(?:\[[^][]+\]|[^][,\s])+"


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


def step_name() -> str:
    """Return the name of this step, such as ``slurm 17.0``: stores refuse connections of steps with another name."""
    return f"slurm {os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}"


def expand_hosts(text: str) -> list[str]:
    """Return the host names of a list, in order, as ``scontrol show hostnames`` does.

    With several brackets in a name the last one varies fastest; ``[07-09]`` keeps the width of its numbers. Raises
    ValueError, which shows the list, for an invalid one.
    """
    if not re.fullmatch(rf"{_NAME}(?:,{_NAME})*", text):
        raise ValueError(f"expected a list of host names such as n[1-3,07-09],login, got {text!r}")
    hosts: list[str] = []
    for name in re.findall(_NAME, text):
        parts = re.split(r"\[([^][]*)\]", name)
        choices = [[part] if index % 2 == 0 else _expand_numbers(part, text) for index, part in enumerate(parts)]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"expected the number that srun sets in {name}, got {text!r}")
    return int(text)


def _expand_numbers(part: str, text: str) -> list[str]:
    """Return the numbers of one pair of brackets, as text."""
    numbers: list[str] = []
    for item in part.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item, re.ASCII)
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if not 0 <= int(last) - int(first) < _MAX_HOSTS:
            raise ValueError(f"expected numbers such as 1-3,07-09 in the brackets of the host list {text!r}")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
