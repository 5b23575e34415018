"""A long random sequence of calls, the same on every rank, equals NumPy at every step."""

from __future__ import annotations

import numpy as np
import pytest
from collectives.cases import SUPPORTED, TRANSPORTS, case_of
from collectives.playing import Report, all_right, report

import procgroup as dist
from cases import FIRST_SEED, Case, CasePart, naming
from operations import EVERY_RANK
from tiers import AT_LENGTH, SAMPLED
from world import run

pytestmark = pytest.mark.timeout(120 if SAMPLED else 2400)

LENGTH = 2000 if AT_LENGTH else 500
RING = 5
"""How many async calls may be outstanding at once."""


def random_cases(seed: int, size: int) -> list[Case]:
    random = np.random.default_rng(seed)
    return [random_case(random, size) for _ in range(LENGTH)]


def random_case(random: np.random.Generator, size: int) -> Case:
    dtype, op = SUPPORTED[random.integers(len(SUPPORTED))]
    largest = 30_000 if random.random() < 0.02 else 3000 if random.random() < 0.2 else 40
    count = int(random.integers(largest))
    operation = EVERY_RANK[random.integers(len(EVERY_RANK))]
    return case_of(operation, dtype, count, op, int(random.integers(size)), int(random.integers(1 << 30)))


def play_sequence(rank: int, size: int, seed: int) -> list[Report]:
    """Blocking or async is chosen by each rank for itself; async calls are waited for up to RING calls later."""
    dist.init_process_group(timeout=30)
    random = np.random.default_rng([seed, rank])
    outstanding: list[CasePart] = []
    parts = [CasePart(case, rank, size) for case in random_cases(seed, size)]
    for number, part in enumerate(parts):
        async_op = part.name == "ring" or random.random() < 0.4  # a ring of blocking sends may wait for the others
        with naming(f"call {number} of seed {seed}, {part.case}"):
            part.start(dist, async_op=bool(async_op))
        if async_op:
            outstanding.append(part)
        while len(outstanding) > RING or (outstanding and random.random() < 0.3):
            wait_for(outstanding.pop(int(random.integers(len(outstanding)))), seed)
    for part in outstanding:
        wait_for(part, seed)
    return [report(part) for part in parts]


def wait_for(part: CasePart, seed: int) -> None:
    with naming(f"a call of seed {seed}, {part.case}"):
        part.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_calls_on_four_ranks_equal_numpys(transport: str, sampled: bool) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + (1 if sampled else 20)):
        environment = {"PROCGROUP_TRANSPORT": transport}
        results = run(play_sequence, 4, args=(seed,), timeout=90, environment=environment)
        with naming(f"seed {seed}, which PROCGROUP_TEST_SEED={seed} plays first"):
            all_right(random_cases(seed, 4), results)
