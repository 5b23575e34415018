"""Random calls on arrays of any layout, and a rank that makes a sequence of them.

Hypothesis chooses short sequences; a seed gives a long one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from collectives.contract_cases import SUPPORTED
from collectives.playing import Report, report
from hypothesis import strategies as st
from operation_table import EVERY_RANK, OPERATIONS
from seeded_cases import Case, CasePart, naming

from layouts import FROZEN, LAYOUTS, SHAPES
from oracle import DTYPES, OPS, is_defined


@dataclass(frozen=True)
class Call(Case):
    """One call on every rank."""

    waits: tuple[int, ...] = ()
    """For each rank in turn: -1 for a blocking call, else how many calls later an asynchronous one is waited for."""


@st.composite
def calls(draw: st.DrawFn, size: int) -> Call:
    """One call; it shrinks towards an all_reduce of no elements."""
    operation = draw(st.sampled_from(EVERY_RANK))
    row = OPERATIONS[operation]
    dtype = draw(st.sampled_from(["int64", *DTYPES]))
    ops = [op for op in OPS if is_defined(op, dtype)]
    if row.reduces and not ops:
        dtype, ops = "float32", ["SUM"]
    return Call(
        operation,
        dtype,
        draw(st.one_of(st.integers(0, 9), st.integers(0, 70), st.sampled_from([257, 4099, 20_011]))),
        draw(st.sampled_from(ops)) if row.reduces else "SUM",
        draw(st.integers(0, size - 1)) if row.root else 0,
        lengths=tuple(draw(st.lists(st.integers(0, 20), max_size=size * size))) if row.is_uneven else (),
        layouts=tuple(draw(st.lists(st.sampled_from([*LAYOUTS, FROZEN]), min_size=1, max_size=4))),
        shares_own_block=draw(st.booleans()),
        seed=draw(st.integers(0, 5)),
        waits=tuple(draw(st.lists(st.integers(-1, 3), min_size=1, max_size=size))),
    )


def sequences(size: int) -> st.SearchStrategy[list[Call]]:
    return st.lists(calls(size), min_size=1, max_size=6)


def long_sequence(seed: int, size: int, length: int) -> list[Call]:
    """Return calls of which most are small, and up to five are outstanding at once."""
    random = np.random.default_rng(seed)
    return [_random_call(random, size) for _ in range(length)]


def _random_call(random: np.random.Generator, size: int) -> Call:
    dtype, op = SUPPORTED[random.integers(len(SUPPORTED))]
    largest = 30_000 if random.random() < 0.02 else 3000 if random.random() < 0.2 else 40
    return Call(
        EVERY_RANK[random.integers(len(EVERY_RANK))],
        dtype,
        int(random.integers(largest)),
        op,
        int(random.integers(size)),
        layouts=tuple(SHAPES),
        values="accumulated",
        shares_own_block=bool(random.integers(2)),
        seed=int(random.integers(1 << 30)),
        waits=tuple(int(random.integers(5)) if random.random() < 0.4 else -1 for _ in range(size)),
    )


def play_sequence(dist: Any, rank: int, size: int, sequence: list[Call]) -> list[Report]:
    """Play calls, asynchronous ones overlapping."""
    parts = [CasePart(call, rank, size) for call in sequence]
    outstanding: list[tuple[int, CasePart]] = []
    for number, (call, part) in enumerate(zip(sequence, parts, strict=True)):
        later = call.waits[rank % len(call.waits)]
        # A ring of blocking sends may wait for the others.
        with naming(f"call {number}, {call}"):
            part.start(dist, async_op=later >= 0 or call.operation == "ring")
        outstanding.append((number + later, part))
        for _, due in [entry for entry in outstanding if entry[0] <= number]:
            _wait(due)
        outstanding = [entry for entry in outstanding if entry[0] > number]
    for _, due in outstanding:
        _wait(due)
    return [report(part) for part in parts]


def _wait(part: CasePart) -> None:
    with naming(part.case):
        part.wait()


def play_seed(dist: Any, rank: int, size: int, task: tuple[int, int]) -> list[Report]:
    """Play the long sequence of a seed and a length."""
    return play_sequence(dist, rank, size, long_sequence(task[0], size, task[1]))
