"""Any sequence of calls, on arrays of any layout, gives what NumPy gives, on every rank, and the same bits on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from collectives.contract_cases import TRANSPORTS
from collectives.playing import all_right
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_calls.calls import long_sequence, play_seed, play_sequence, sequences
from random_calls.standing_world import StandingWorld
from seeded_cases import FIRST_SEED, naming

import two_hosts
from tiers import AT_LENGTH, SAMPLED

EXAMPLES = 10 if SAMPLED else 500
"""Of each world; there are ten worlds in a full run, and six in a sample."""

SEEDS = 1 if SAMPLED else 20
LENGTH = 2000 if AT_LENGTH else 500
"""The number of calls of each seed."""

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

pytestmark = pytest.mark.timeout(120 if SAMPLED else 3600)


@pytest.mark.parametrize(("size", "transport"), WORLDS)
def test_random_sequences_equal_numpys(size: int, transport: str) -> None:
    play_random_sequences(size, transport)


@pytest.mark.skipif(bool(two_hosts.lacks()), reason=two_hosts.lacks())
@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 1, 1), (0, 1, 0, 1)])
def test_random_sequences_between_two_hosts_equal_numpys(layout: tuple[int, ...]) -> None:
    with two_hosts.joined() as hosts:
        play_random_sequences(len(layout), "auto", two_hosts.environments(hosts, layout))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_long_sequence_on_four_ranks_equals_numpys(transport: str) -> None:
    with StandingWorld(play_seed, 4, transport) as world:
        for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
            with naming(f"seed {seed}, which PROCGROUP_TEST_SEED={seed} plays first"):
                all_right(long_sequence(seed, 4, LENGTH), world.play((seed, LENGTH)))


def play_random_sequences(size: int, transport: str, environments: Sequence[Mapping[str, str]] | None = None) -> None:
    with StandingWorld(play_sequence, size, transport, environments) as world:

        @settings(
            max_examples=EXAMPLES,
            derandomize=SAMPLED,
            database=None,
            deadline=None,  # how long an example takes says how busy the machine is
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            # To shrink takes a fresh world for each failure: too long for the time that a sample has.
            phases=[Phase.generate] if SAMPLED else [Phase.generate, Phase.shrink],
        )
        @given(st.data())
        def check(data: st.DataObject) -> None:
            sequence = data.draw(sequences(size))
            all_right(sequence, world.play(sequence))

        check()
