"""Random calls for Hypothesis to choose from, with arrays of any layout, and what a rank does with a sequence of them.

A call is a case of the parity tests, on the same oracle, with lists of sizes and layouts of its own for every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from parity.cases import DTYPES, OPS, PREFIX, REDUCING, ROOTED, UNEVEN, VERBS, Array, Case, is_defined
from parity.program import NumpyArrays, Player

LAYOUT_KINDS = [
    "plain",
    "offset",
    "steps",
    "backwards",
    "column",
    "transposed",
    "both reversed",
    "third axis",
    "frozen",
]
"""Memory layouts, of which "frozen" (read-only, and one element in memory where all are equal) is for inputs only."""


@dataclass(frozen=True)
class Call(Case):
    """One call on every rank; what differs between ranks follows from the lists, which are taken in turn."""

    lengths: tuple[int, ...] = ()
    """For each pair of ranks, or each rank, what is added to ``count`` when ``uneven``."""
    layouts: tuple[str, ...] = ("plain",)
    """The layouts of the arrays of the ranks, in turn."""
    waits: tuple[int, ...] = ()
    """For each rank in turn: -1 for a blocking call, else how many calls later an asynchronous one is waited for."""

    def pieces(self, size: int) -> list[int]:
        return [self.count + self._extra(rank) for rank in range(size)]

    def splits(self, rank: int, size: int) -> list[int]:
        return [self.count + self._extra(rank * size + target) for target in range(size)]

    def _extra(self, number: int) -> int:
        return self.lengths[number % len(self.lengths)] if self.uneven and self.lengths else 0


@st.composite
def calls(draw: st.DrawFn, size: int) -> Call:
    """One call; it shrinks towards an all_reduce of no elements."""
    others = [verb for verb in (*VERBS, *PREFIX) if verb != "all_reduce"]
    verb = draw(st.sampled_from(["all_reduce", *others, "barrier"]))
    dtype = draw(st.sampled_from(["int64", *DTYPES]))
    ops = [op for op in OPS if is_defined(op, dtype)]
    if verb in (*REDUCING, *PREFIX) and not ops:
        dtype, ops = "float32", ["SUM"]
    return Call(
        verb,
        dtype,
        draw(st.one_of(st.integers(0, 9), st.integers(0, 70), st.sampled_from([257, 4099, 20_011]))),
        draw(st.sampled_from(ops)) if verb in (*REDUCING, *PREFIX) else "SUM",
        draw(st.integers(0, size - 1)) if verb in ROOTED else 0,
        uneven=draw(st.booleans()) if verb in UNEVEN else False,
        seed=draw(st.integers(0, 5)),
        lengths=tuple(draw(st.lists(st.integers(0, 20), max_size=size * size))),
        layouts=tuple(draw(st.lists(st.sampled_from(LAYOUT_KINDS), min_size=1, max_size=4))),
        waits=tuple(draw(st.lists(st.integers(-1, 3), min_size=1, max_size=size))),
    )


def sequences(size: int) -> st.SearchStrategy[list[Call]]:
    return st.lists(calls(size), min_size=1, max_size=6)


class RandomPlayer(Player):
    """Plays calls whose arrays have the layouts that the call says."""

    def laid_out(self, case: Case, array: Array, part: int, written: bool) -> Array:
        assert isinstance(case, Call)
        kind = case.layouts[(self.rank + part) % len(case.layouts)]
        if kind == "frozen" and written:
            kind = "plain"
        return arranged(array, kind, one_dimension=case.verb.endswith("_single"))


def arranged(array: Array, kind: str, one_dimension: bool) -> Array:
    """Return a view in the layout ``kind`` that has, in C order, the elements of ``array``."""
    count = array.size
    rows = next((rows for rows in (3, 2, 5) if count % rows == 0), 1)
    shape = (count,) if one_dimension else (rows, count // rows)
    if count == 1 and not one_dimension:
        shape = ()
    if kind == "frozen":
        equal = count and (array.view(np.uint8).reshape(count, -1) == array[:1].view(np.uint8)).all()
        frozen = np.broadcast_to(array[:1].copy().reshape(()), shape) if equal else array.reshape(shape).copy()
        frozen.flags.writeable = False
        return frozen
    view = _EMPTY[kind](shape, array.dtype) if len(shape) == 2 or kind in _ANY_SHAPE else np.empty(shape, array.dtype)
    view[...] = array.reshape(shape)
    return view


def _offset(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.zeros(int(np.prod(shape)) + 3, dtype)[3:].reshape(shape)


def _steps(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.zeros(tuple(2 * length + 1 for length in shape), dtype)[(..., *(slice(1, None, 2) for _ in shape))]


def _backwards(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.zeros(shape, dtype)[(..., *(slice(None, None, -1) for _ in shape))]


_EMPTY = {
    "plain": lambda shape, dtype: np.zeros(shape, dtype),
    "offset": _offset,
    "steps": _steps,
    "backwards": _backwards,
    "column": lambda shape, dtype: np.zeros((*shape, 3), dtype)[..., 1],
    "transposed": lambda shape, dtype: np.zeros(shape[::-1], dtype).T,
    "both reversed": lambda shape, dtype: np.zeros(shape[::-1], dtype).T[::-1, ::-1],
    "third axis": lambda shape, dtype: np.zeros((shape[1], 2, shape[0]), dtype)[:, 0, :].T,
}
_ANY_SHAPE = ["plain", "offset", "steps", "backwards", "column"]


def play_sequence(dist: Any, rank: int, size: int, sequence: list[Call]) -> list[str]:
    """Play calls, asynchronous ones overlapping; return what is wrong with each."""
    player = RandomPlayer(dist, NumpyArrays(), rank, size)
    outstanding: list[tuple[int, Any]] = []
    everything = []
    for number, call in enumerate(sequence):
        later = call.waits[rank % len(call.waits)]
        pending = player.start(call, async_op=later >= 0 or call.verb == "ring")
        everything.append(pending)
        outstanding.append((number + later, pending))
        for _, due in [entry for entry in outstanding if entry[0] <= number]:
            due.wait()
        outstanding = [entry for entry in outstanding if entry[0] > number]
    for _, due in outstanding:
        due.wait()
    return [player.judge(pending) for pending in everything]
