"""What is played on torch.distributed and on procgroup alike: a case, what goes into it, and what must come out.

The values are chosen so that every partial result is exact in the element type: then neither the order of the
ranks nor the rounding of 16-bit floats shows, and what NumPy says holds to the bit for both libraries. What differs
between the libraries, such as NaNs, is played by cases whose ``values`` say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX, *FLOAT8]

OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
REDUCING = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"]
PREFIX = ["scan", "exscan"]
"""Reductions that torch has not: random calls play them, the parity tests do not."""
MOVING = [
    "broadcast",
    "gather",
    "all_gather",
    "all_gather_single",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "ring",
]
VERBS = [*REDUCING, *MOVING]
"""Each is a function of both libraries, but for "ring": every rank sends to the next and receives from the former."""
ROOTED = ["broadcast", "reduce", "gather", "scatter"]
UNEVEN = ["all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"]
"""The verbs whose pieces may have different sizes."""

LAYOUTS = ["contiguous", "offset", "strided", "column", "fortran"]
MIXED = "another on each rank"

SIZES = [1, 2, 3, 4, 7]
BEYOND_A_SEGMENT = 70_001
"""Elements: more than any implementation moves in one piece of its pipeline for 8-byte elements."""


@dataclass(frozen=True)
class Case:
    """One call on every rank. ``count`` is the number of elements of one rank's piece."""

    verb: str
    dtype: str
    count: int
    op: str = "SUM"
    root: int = 0
    layout: str = "contiguous"
    uneven: bool = False
    values: str = "exact"
    """"exact", "nan", "zeros" (both signs), "truth" (several True in one place) or "halves" (sums to be rounded)."""
    seed: int = 0

    def pieces(self, size: int) -> list[int]:
        """How many elements the piece of each rank has."""
        return [self.count + (rank * 3 % 5 if self.uneven else 0) for rank in range(size)]

    def splits(self, rank: int, size: int) -> list[int]:
        """How many elements ``rank`` sends to each rank in an all_to_all."""
        return [self.count + ((rank + 2 * target) % 4 if self.uneven else 0) for target in range(size)]

    def __str__(self) -> str:
        op = f" {self.op}" if self.verb in (*REDUCING, *PREFIX) else ""
        extra = (" uneven" if self.uneven else "") + (f" of {self.values}" if self.values != "exact" else "")
        return f"{self.verb}{op} {self.count} {self.dtype} {self.layout}{extra} root {self.root}"


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" or name in FLOAT8 else name)


def is_defined(op: str, dtype: str) -> bool:
    """Whether a reduction has a meaning, and so is done rather than refused."""
    if dtype in FLOAT8:
        return False
    if dtype in COMPLEX:
        return op in ("SUM", "AVG", "PRODUCT")
    if op == "AVG":
        return dtype != "bool"
    return op in ("SUM", "PRODUCT", "MIN", "MAX") or dtype not in FLOATS


def counts(size: int) -> list[int]:
    return sorted({0, 1, size - 1, 40, 1009, BEYOND_A_SEGMENT})


def every_case(size: int) -> Iterator[Case]:
    """The whole product: verb x dtype x op x count x layout, even and uneven, with the root going round."""
    for verb, dtype in product(VERBS, DTYPES):
        ops = OPS if verb in REDUCING else ["SUM"]
        uneven = [False, True] if verb in UNEVEN else [False]
        choices = product(ops, counts(size), [*LAYOUTS, MIXED], uneven)
        for number, (op, count, layout, parts) in enumerate(choices):
            # Large arrays say nothing new about every pair of layout and type.
            if count < BEYOND_A_SEGMENT or layout in ("contiguous", MIXED):
                yield Case(verb, dtype, count, op, number % size if verb in ROOTED else 0, layout, parts)


def values(case: Case, rank: int, part: int, count: int) -> Array:
    """What ``rank`` puts into its ``part``-th array."""
    random = np.random.default_rng([case.seed, count, rank, part])
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
        # A sum of two Trues is a case of its own: "truth".
        return chosen if case.op != "SUM" else chosen & (np.arange(count) % 8 == rank)
    if case.dtype in INTEGERS:
        return random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    choices = [1.0, -1.0, 2.0, 0.5] if case.op == "PRODUCT" else [0.0, 1.0, 2.0, -1.0, -3.0, 8.0]
    numbers = random.choice(choices, count)
    if case.op == "AVG":
        # The same powers of two on all ranks: their mean is exact for every size, even times a rounded reciprocal.
        numbers = np.array([0.0, 1.0, 2.0, 4.0, 8.0])[np.arange(count) % 5]
    if case.dtype in COMPLEX:
        return np.asarray(numbers + 1j * (numbers[::-1] if case.op != "AVG" else numbers)).astype(dtype)
    return numbers.astype(dtype)


_FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def combined(case: Case, inputs: Sequence[Array]) -> Array:
    """What NumPy says that the reduction gives. For one that is to be refused nobody asks."""
    if not is_defined(case.op, case.dtype):
        return inputs[0]
    dtype = inputs[0].dtype
    if case.op == "AVG" and case.dtype in INTEGERS:  # the sum does not overflow, and the quotient is truncated
        exact = reduce(np.add, [array.astype(object) for array in inputs])
        return np.asarray(np.sign(exact) * (abs(exact) // len(inputs))).astype(dtype)
    wide = [array.astype(np.float32) if case.dtype in ("float16", "bfloat16") else array for array in inputs]
    with np.errstate(all="ignore"):
        if case.values == "zeros":  # the negative zero is the smaller one
            negative = np.stack([np.signbit(array) for array in wide])
            minimum = negative.any(axis=0) if case.op == "MIN" else negative.all(axis=0)
            return np.asarray(np.where(minimum, -0.0, 0.0)).astype(dtype)
        total = np.asarray(reduce(_FUNCTIONS[case.op], wide))
        if case.op != "AVG":
            return total.astype(dtype)
        # Part by part: NumPy rounds twice when it divides a complex number.
        parts = total.view(total.real.dtype) if case.dtype in COMPLEX else total
        return np.asarray(parts / len(inputs)).astype(parts.dtype).view(total.dtype).astype(dtype)
