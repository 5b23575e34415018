"""Random calls on arrays of any layout for Hypothesis to choose from, and a rank that makes a sequence of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from cases import Case, CasePart
from layouts import FROZEN, LAYOUTS
from operations import EVERY_RANK, OPERATIONS
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


def play_sequence(dist: Any, rank: int, size: int, sequence: list[Call]) -> list[str]:
    """Play calls, asynchronous ones overlapping; return what is wrong with each."""
    parts = [CasePart(call, rank, size) for call in sequence]
    outstanding: list[tuple[int, CasePart]] = []
    for number, (call, part) in enumerate(zip(sequence, parts, strict=True)):
        later = call.waits[rank % len(call.waits)]
        part.start(dist, async_op=later >= 0 or call.operation == "ring")
        outstanding.append((number + later, part))
        for _, due in [entry for entry in outstanding if entry[0] <= number]:
            due.wait()
        outstanding = [entry for entry in outstanding if entry[0] > number]
    for _, due in outstanding:
        due.wait()
    return [part.wrong() for part in parts]
