"""Any sequence of calls, on arrays of any layout, gives what NumPy gives, on every rank, and the same bits on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from collectives.contract_cases import TRANSPORTS
from collectives.playing import Report, all_right
from random_calls.calls import Call, long_sequence, play_sequence, short_sequence
from seeded_cases import FIRST_SEED, naming

import procgroup as dist
import two_hosts
from tiers import AT_LENGTH, SAMPLED
from world import run

SEEDS = range(FIRST_SEED, FIRST_SEED + (20 if SAMPLED else 500))
"""Of the short sequences in each world; there are fifteen worlds in a full run, and nine in a sample."""

LONG_SEEDS = range(FIRST_SEED, FIRST_SEED + (1 if SAMPLED else 20))
LENGTH = 2000 if AT_LENGTH else 500
"""The number of calls of each of these."""

WORLDS = [
    (2, "shm"),
    (3, "tcp"),
    (4, "shm"),
    (7, "shm"),
    (1, "shm"),
    (2, "tcp"),
    (3, "spanning"),
    (4, "spanning"),
    (7, "spanning"),
]
if not SAMPLED:
    WORLDS = list(product([1, 2, 3, 4, 7], ["shm", "tcp", "spanning"]))

SECONDS = 250 if SAMPLED else 3500
pytestmark = pytest.mark.timeout(SECONDS + 20)


@pytest.mark.parametrize(("size", "transport"), WORLDS)
def test_random_sequences_equal_numpys(size: int, transport: str) -> None:
    check({seed: short_sequence(seed, size) for seed in SEEDS}, size, transport)


@pytest.mark.skipif(bool(two_hosts.lacks()), reason=two_hosts.lacks())
@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 1, 1), (0, 1, 0, 1)])
def test_random_sequences_between_two_hosts_equal_numpys(layout: tuple[int, ...]) -> None:
    size = len(layout)
    with two_hosts.joined() as hosts:
        environments = two_hosts.environments(hosts, layout)
        check({seed: short_sequence(seed, size) for seed in SEEDS}, size, "auto", environments)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_long_sequence_on_four_ranks_equals_numpys(transport: str) -> None:
    check({seed: long_sequence(seed, 4, LENGTH) for seed in LONG_SEEDS}, 4, transport)


def check(
    sequences: dict[int, list[Call]], size: int, transport: str, environments: Sequence[Mapping[str, str]] | None = None
) -> None:
    """Play the sequences of these seeds in one world."""
    environment = {"PROCGROUP_TRANSPORT": transport}
    where = {"environment": environment, "environments": environments, "timeout": SECONDS}
    ranks: list[dict[int, list[Report]]] = run(play_all, size, args=(sequences,), **where)
    for seed, sequence in sequences.items():
        with naming(_name(seed)):
            all_right(sequence, [reports[seed] for reports in ranks])


def play_all(rank: int, size: int, sequences: dict[int, list[Call]]) -> dict[int, list[Report]]:
    dist.init_process_group(timeout=60)
    reports = {}
    for seed, sequence in sequences.items():
        with naming(_name(seed)):
            reports[seed] = play_sequence(dist, rank, size, sequence)
    return reports


def _name(seed: int) -> str:
    return f"seed {seed}, which PROCGROUP_TEST_SEED={seed} plays first"
