"""PyTorch's own tests of torch.distributed pass on procgroup where they pass on Gloo."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from parity.torch_suite import passing_on, play

from tiers import SAMPLED

ABOUT_GLOO = ["test_barrier_timeout_global", "test_ddp_logging_data_cpu", "test_monitored_barrier_gloo"]
"""They look for what only Gloo says: always in the sample."""

HASTY = {"test_barrier_timeout_full_group", "test_barrier_timeout_global"}
"""They give their ranks one second to make a group: played once more before they count as failed."""

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]


def sample(tests: Sequence[str], count: int) -> list[str]:
    """Return some of the tests, the same ones each time; or all of them in make test-all."""
    return random.Random(13).sample(list(tests), count) if SAMPLED else list(tests)


def check(backend: str, tests: Sequence[str]) -> None:
    verdicts = play(backend, tests)
    if late := [one.test for one in verdicts if one.outcome != "passed" and one.test in HASTY]:
        again = {one.test: one for one in play(backend, late)}
        verdicts = [again.get(one.test, one) for one in verdicts]
    assert [verdict.test for verdict in verdicts] == list(tests)
    wrong = [verdict for verdict in verdicts if verdict.outcome != "passed"]
    assert not wrong, "\n".join(f"{one.test} {one.outcome}: {one.reason}\n{one.output}" for one in wrong)


def test_what_passes_on_gloo_passes_on_procgroup_under_gloo_s_name() -> None:
    check("replaced", sorted({*sample(passing_on("replaced"), 9), *ABOUT_GLOO}))


def test_what_passes_on_gloo_passes_on_procgroup_under_its_own_name() -> None:
    check("procgroup", sample(passing_on("procgroup"), 6))


def test_what_passes_in_nccl_s_place_does() -> None:
    check("nccl", sample(passing_on("nccl"), 7))


@pytest.mark.slow
def test_the_list_says_what_passes_on_gloo() -> None:
    passed = [verdict.test for verdict in play("gloo") if verdict.outcome == "passed"]
    assert sorted(passed) == sorted(passing_on("gloo")), "write it again: torch_suite.py gloo --write"
