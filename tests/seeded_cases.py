"""Cases: a call on every rank whose elements follow from its seed and the ranks, so that each rank knows the result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from operation_table import OPERATIONS, Operation, Part

from layouts import FLAT, FROZEN, arranged
from oracle import COMPLEX, FLOAT8, INTEGERS, Array, is_defined, numpy_dtype
from procgroup.testing.backend_cases import LOGICAL

FIRST_SEED = int(os.environ.get("PROCGROUP_TEST_SEED", "0"))
"""Of the random tests that play one seed after the other: the seed that a failure names is the first with this."""


@dataclass(frozen=True)
class Case:
    """One call on every rank."""

    operation: str
    dtype: str
    count: int
    """The number of elements of a block, but for what ``lengths`` adds."""
    op: str = "SUM"
    root: int = 0
    lengths: tuple[int, ...] = ()
    """What is added to the blocks of the ranks, or of the pairs of ranks, in turn: for operations that allow it."""
    layouts: tuple[str, ...] = ("flat",)
    """The layouts of the arrays of the ranks, in turn."""
    values: str = "exact"
    """"exact" in the element type whatever the order, "accumulated" (exact in the accumulator: float32 for 16-bit
    floats), "nan", "zeros" (both signs), "truth" (several True in one place) or "halves" (sums to be rounded)."""
    shares_own_block: bool = False
    seed: int = 0

    @property
    def row(self) -> Operation:
        return OPERATIONS[self.operation]

    @property
    def is_defined(self) -> bool:
        return not self.row.reduces or is_defined(self.op, self.dtype)

    def length(self, source: int, target: int, size: int) -> int:
        """Return how many elements ``source`` gives to ``target``."""
        if not self.lengths or not self.row.is_uneven:
            return self.count
        number = {"all_gather": source, "reduce_scatter": target}.get(self.operation, source * size + target)
        return self.count + self.lengths[number % len(self.lengths)]

    def __str__(self) -> str:
        op = f" {self.op}" if self.row.reduces else ""
        root = f" root {self.root}" if self.row.root else ""
        lengths = f", {list(self.lengths)} more" if self.lengths else ""
        return (
            f"{self.operation}{op}{root} of {self.count} {self.dtype}{lengths} "
            f"({self.values}, {' '.join(self.layouts)}, seed {self.seed})"
        )


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Add what is played to the text of an exception that it raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {what}")
        raise


class CasePart(Part):
    """One rank's part in a case."""

    def __init__(self, case: Case, rank: int, size: int) -> None:
        super().__init__(case.operation, rank, size, root=case.root, op=case.op, dtype=case.dtype)
        self.case, self.is_uneven, self.tag = case, bool(case.lengths), case.seed
        self.shares_own_block = case.shares_own_block
        self.is_flat = self.name == "all_to_all_single"
        """Whether all arrays have one dimension: splits count rows."""

    def block(self, source: int, target: int = 0) -> Array:
        return values(self.case, source, target, self.case.length(source, target, self.size))

    def combined(self, blocks: Any) -> Array:
        """A reduction that is to be refused gives anything."""
        return super().combined(blocks) if self.case.is_defined else blocks[0]

    def laid_out(self, elements: Array, place: int, is_written: bool) -> Array:
        kind = self.case.layouts[(self.rank + place) % len(self.case.layouts)]
        if is_written and kind == FROZEN:
            kind = "matrix"
        if self.is_flat and kind not in FLAT:
            kind = "steps"
        return arranged(elements, kind)


class TorchPart(CasePart):
    """A part whose arrays are torch tensors, where torch can have such."""

    def wrap(self, array: Array) -> Any:
        return as_torch(array) if min(array.strides, default=0) >= 0 else array


def as_torch(array: Array) -> Any:
    """Return a torch tensor over the memory of an array."""
    import torch

    if array.dtype.name == "bfloat16" or array.dtype.name in FLOAT8:
        bits = torch.from_numpy(array.view(f"u{array.dtype.itemsize}"))
        return bits.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def values(case: Case, rank: int, place: int, count: int) -> Array:
    """Return the elements of one block of ``rank``."""
    random = np.random.default_rng([case.seed, count, rank, place])
    dtype = numpy_dtype(case.dtype)
    if case.values == "nan":
        return random.choice([1.0, -2.0, np.nan], count).astype(dtype)
    if case.values == "zeros":
        return random.choice([0.0, -0.0], count).astype(dtype)
    if case.values == "truth":
        return np.ones(count, dtype)
    if case.values == "halves":
        return np.full(count, 2048.0 if rank == 0 else 1.0).astype(dtype)
    if case.dtype == "bool":
        chosen = random.integers(0, 2, count).astype(bool)
        # Where torch plays too, a sum of two Trues is a case of its own: "truth".
        return chosen & (np.arange(count) % 8 == rank) if case.op == "SUM" and case.values == "exact" else chosen
    if case.row.reduces and case.op in LOGICAL:  # otherwise few would be 0
        return random.choice(np.array([0, 1, np.iinfo(dtype).min, np.iinfo(dtype).max], dtype), count)
    # Any bits: integers wrap, and what is moved is only moved.
    if case.dtype in INTEGERS or (case.values == "accumulated" and not case.row.reduces):
        return random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    numbers = (_accumulated if case.values == "accumulated" else _exact)(case, random, count)
    if case.dtype in COMPLEX:
        return np.asarray(numbers + 1j * (numbers[::-1] if case.op != "AVG" else numbers)).astype(dtype)
    return numbers.astype(dtype)


def _exact(case: Case, random: np.random.Generator, count: int) -> Array:
    if case.op == "AVG":
        # The same powers of two on all ranks: their mean is exact for every size, even times a rounded reciprocal.
        return np.array([0.0, 1.0, 2.0, 4.0, 8.0])[np.arange(count) % 5]
    return random.choice([1.0, -1.0, 2.0, 0.5] if case.op == "PRODUCT" else [0.0, 1.0, 2.0, -1.0, -3.0, 8.0], count)


def _accumulated(case: Case, random: np.random.Generator, count: int) -> Array:
    if case.op == "PRODUCT":
        return random.choice([1.0, -1.0, 2.0, 0.5, -0.5], count)
    if case.op in ("MIN", "MAX"):
        return random.choice([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan], count)
    # Next to these, one is lost when a 16-bit float is rounded after each addition.
    large = {"float16": 2048.0, "bfloat16": 256.0}.get(case.dtype, 4096.0)
    return random.choice([large, 1.0, 1.0, 1.0, 3.0, 0.0, -1.0], count)
