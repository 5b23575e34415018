"""What is played on torch.distributed and on procgroup alike.

The values are chosen so that every partial result is exact in the element type: then neither the order of the
ranks nor the rounding of 16-bit floats shows, and what NumPy says holds to the bit for both libraries. What differs
between the libraries, such as NaNs, is played by cases whose ``values`` say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch.distributed
from operation_table import COLLECTIVES, OPERATIONS
from seeded_cases import Case

from oracle import DTYPES, OPS


@dataclass(frozen=True)
class Report:
    """What one rank saw of one case. Both are "" when all was right."""

    wrong: str = ""
    """What is wrong with its arrays, also with those that must not change."""
    refused: str = ""
    """The exception's type and text."""


PLAYED = [name for name in (*COLLECTIVES, "ring") if OPERATIONS[name].in_torch and name != "barrier"]

LAYOUTS = ["flat", "offset", "steps", "column", "transposed"]
MIXED = (*LAYOUTS[1::2], *LAYOUTS[::2])
"""Another layout on each rank, and for each array of a list."""
UNEVEN = (0, 3, 1, 4, 2)

SIZES = [1, 2, 3, 4, 7]
BEYOND_A_SEGMENT = 70_001
"""Elements: more than any implementation moves in one piece of its pipeline for 8-byte elements."""


def counts(size: int) -> list[int]:
    return sorted({0, 1, size - 1, 40, 1009, BEYOND_A_SEGMENT})


def every_case(size: int) -> Iterator[Case]:
    """The whole product: operation x dtype x op x count x layout, even and uneven, with the root going round."""
    for name, dtype in product(PLAYED, DTYPES):
        row = OPERATIONS[name]
        ops = [op for op in OPS if hasattr(torch.distributed.ReduceOp, op)] if row.reduces else ["SUM"]
        lengths = [(), UNEVEN] if row.is_uneven else [()]
        choices = product(ops, counts(size), [*((layout,) for layout in LAYOUTS), MIXED], lengths)
        for number, (op, count, layouts, extra) in enumerate(choices):
            # Large arrays say nothing new about every pair of layout and type.
            if count < BEYOND_A_SEGMENT or layouts in (("flat",), MIXED):
                yield Case(name, dtype, count, op, number % size if row.root else 0, extra, layouts)
