"""The cases of the contract of the collectives: what goes in is exact in the accumulator (float32 for 16-bit floats).

Then only the one rounding at the end is left, and the result is known to the bit, whatever the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from operation_table import OPERATIONS
from seeded_cases import Case

from layouts import SHAPES
from oracle import FLOATS, INTEGERS, OPS, is_defined, numpy_dtype

DTYPES = ["bool", *INTEGERS, *FLOATS]
TRANSPORTS = ["shm", "tcp", "spanning"]
SIZES = [1, 2, 3, 4, 7]

EDGES = [48, 16 << 10, 512 << 10]
"""Lengths in bytes around which an implementation may change its way of doing it."""

SUPPORTED = [(dtype, op) for dtype in DTYPES for op in OPS if is_defined(op, dtype)]


def case_of(operation: str, dtype: str, count: int, op: str = "SUM", root: int = 0, seed: int = 0) -> Case:
    """Return a case whose arrays have another shape on each rank."""
    layouts = tuple(SHAPES)
    return Case(operation, dtype, count, op, root, (), layouts, "accumulated", seed % 2 == 1, seed)


def counts(dtype: str, size: int) -> list[int]:
    """Numbers of elements at which mistakes show: none, one, fewer than ranks, a prime, each side of every edge."""
    itemsize = numpy_dtype(dtype).itemsize
    edges = [*EDGES, 3 * EDGES[-1]]
    around = [edge // itemsize + offset for edge in edges for offset in (-1, 0, 1)]
    return sorted({0, 1, size - 1, size, 4099, *around})


def every_case(names: Sequence[str], size: int) -> Iterator[Case]:
    """The whole product."""
    for name, dtype in product(names, DTYPES):
        row = OPERATIONS[name]
        ops = [op for op in OPS if is_defined(op, dtype)] if row.reduces else ["SUM"]
        for number, (op, count) in enumerate(product(ops, counts(dtype, size))):
            large = count * numpy_dtype(dtype).itemsize > EDGES[1] + 8
            roots: Sequence[int] = range(size) if row.root and not large else [count % size]
            for root in roots:
                yield case_of(name, dtype, count, op, root, seed=number)


def choose(names: Sequence[str], size: int, sampled: bool, budget: int = 150, seed: int = 0) -> list[Case]:
    """The whole product, or a seeded sample of it: each dtype and op once, few large arrays."""
    whole = list(every_case(names, size))
    if not sampled:
        return whole
    random = np.random.default_rng([seed, size, len(names)])
    chosen = list(_one_of_each(names, size, random))
    for index in random.permutation(len(whole))[: max(0, budget - len(chosen))]:
        case = whole[index]
        if case.count * numpy_dtype(case.dtype).itemsize < EDGES[-1] - 8 or random.random() < 0.3:
            chosen.append(case)
    return chosen


def _one_of_each(names: Sequence[str], size: int, random: np.random.Generator) -> Iterator[Case]:
    for name, (dtype, op) in product(names, SUPPORTED):
        if OPERATIONS[name].reduces or op == "SUM":
            count = int(random.integers(0, 3000))
            yield case_of(name, dtype, count, op, int(random.integers(size)), int(random.integers(1 << 30)))
