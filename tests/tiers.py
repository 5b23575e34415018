"""How much of the suite runs: the tier, which PROCGROUP_TEST_TIER names and the make targets set.

    quick    what an edit can break, in a minute: `make quick`
    test     every feature, schedule, error and example once: `make test`, and pytest by hand
    landing  also all that protects a change on its way into main: `make test-landing`, .ci/run
    all      also the whole products, the soaks and the clients: `make test-all`

A test is in the tiers from "test" on, unless `landing.toml` names it, or it has the mark ``slow``: then it begins with
"landing" or "all". "quick" takes the files that `areas.py` names.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

TIERS = ("quick", "test", "landing", "all")
TIER = os.environ.get("PROCGROUP_TEST_TIER") or "test"
if TIER not in TIERS:
    raise ValueError(f"PROCGROUP_TEST_TIER must be one of {', '.join(TIERS)}, but is {TIER!r}.")

SAMPLED = TIER != "all"
"""Whether the tests take samples of their large products."""

AT_LENGTH = TIER in ("landing", "all")
"""Whether tests repeat what shows in one of many runs."""

TESTS = Path(__file__).resolve().parent
LANDING: dict[str, dict[str, list[str]]] = tomllib.loads((TESTS / "landing.toml").read_text())

LONGEST = (
    "soak/test_soak.py",
    "documentation/test_documentation.py",
    "examples/test_examples.py",
    "torch_plugin/test_registration.py",
    "launch/several_nodes/test_several_hosts.py",
    "launch/options/test_torchrun_s_commands.py",
    "rendezvous/test_torchrun.py",
    "collectives/test_collectives.py",
    "nccl/test_nccl_collectives.py",
    "parity/test_parity.py",
    "parity/test_torch_suite.py",
    "functional/test_jax.py",
    "mpi/test_mpi_collectives.py",
    "launch/options/test_submit.py",
    "parallel/test_distributed_data_parallel_lost_ranks.py",
    "parity/test_torch_programs.py",
    "mpi/test_mpi_failures.py",
    "torch_plugin/test_blame.py",
    "torch_gpus/test_tutorials.py",
)
"""The files below tests/ that take a minute or more in "landing". They begin first,
those that need torch spread out: two cores do not start six of them at once."""


def begins_with(file: str, test: str, parameters: str, is_slow: bool) -> str:
    """Return the first tier that has a test; ``file`` is its path below tests/, ``parameters`` the id of their set."""
    if is_slow:
        return "all"
    table = LANDING.get(file, {})
    kept = table.get(test)
    if kept is None and (transport := re.search(r"(?:^|-)(shm|tcp|spanning)(?:$|-)", parameters)):
        return "test" if transport[1] in table.get("*", transport[1]) else "landing"
    return "test" if kept is None or any(part in parameters for part in kept) else "landing"


def place(file: str) -> int:
    """Return where a file below tests/ stands in the order in which files begin."""
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def is_run(first: str) -> bool:
    """Return whether a test that begins with this tier runs."""
    return first == "test" or TIERS.index(TIER) >= TIERS.index(first)
