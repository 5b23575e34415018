"""Random calls on arrays of any layout, and a rank that makes sequences of them. All follow from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from collectives.contract_cases import SUPPORTED
from collectives.playing import Report, report
from operation_table import EVERY_RANK, OPERATIONS
from seeded_cases import Case, CasePart, naming

from layouts import FROZEN, LAYOUTS, SHAPES
from oracle import DTYPES, OPS, is_defined


@dataclass(frozen=True)
class Call(Case):
    """One call on every rank."""

    waits: tuple[int, ...] = ()
    """For each rank in turn: -1 for a blocking call, else how many calls later an asynchronous one is waited for."""


def short_sequence(seed: int, size: int) -> list[Call]:
    """Return one to six calls, of any dtype, with any layouts, and with blocks that differ in size."""
    random = np.random.default_rng([seed, size])
    return [_any_call(random, size) for _ in range(random.integers(1, 7))]


def long_sequence(seed: int, size: int, length: int) -> list[Call]:
    """Return calls of which most are small, and up to five are outstanding at once."""
    random = np.random.default_rng(seed)
    return [_random_call(random, size) for _ in range(length)]


def _any_call(random: np.random.Generator, size: int) -> Call:
    def some(choices: Sequence[Any], most: int) -> tuple[Any, ...]:
        return tuple(choices[random.integers(len(choices))] for _ in range(random.integers(most + 1)))

    operation = EVERY_RANK[random.integers(len(EVERY_RANK))]
    row = OPERATIONS[operation]
    dtype = DTYPES[random.integers(len(DTYPES))]
    ops = [op for op in OPS if is_defined(op, dtype)]
    if row.reduces and not ops:
        dtype, ops = "float32", ["SUM"]
    return Call(
        operation,
        dtype,
        int(random.choice([random.integers(10), random.integers(71), random.choice([257, 4099, 20_011])])),
        ops[random.integers(len(ops))] if row.reduces else "SUM",
        int(random.integers(size)) if row.root else 0,
        lengths=some(range(21), size * size) if row.is_uneven else (),
        layouts=some([*LAYOUTS, FROZEN], 4) or ("flat",),
        shares_own_block=bool(random.integers(2)),
        seed=int(random.integers(6)),
        waits=some(range(-1, 4), size) or (-1,),
    )


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
