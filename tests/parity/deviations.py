"""Where procgroup differs from torch.distributed with Gloo, and why: the one table of it.

Each entry says of which cases it speaks and what torch does there, and has a witness: a case of three ranks in which
torch is seen to do so. docs/reference/deviations.md is written from here:

    python tests/parity/deviations.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parity.played import MIXED, UNEVEN
from parity.probes import PROBES
from seeded_cases import Case

from oracle import COMPLEX, FLOAT8, INTEGERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "deviations.md"
WITNESS_SIZE = 3
NO_GLOO_TYPE = ["int16", "uint16", "uint32", "uint64", *FLOAT8]
SCATTERED = [("steps",), ("column",), MIXED]
NOT_CONTIGUOUS = [*SCATTERED, ("transposed",)]
IN_PLACE = ["all_reduce", "reduce", "broadcast"]


@dataclass(frozen=True)
class Deviation:
    """One way in which torch differs."""

    what: str
    torch: str
    ours: str
    applies: Callable[[Case], bool]
    witness: Case
    refused: str = ""
    """A pattern of the text with which torch refuses; "" where it is silent about wrong elements."""
    asked: bool = True
    """False where torch hangs or ends the process, so that it cannot be asked again and again."""


DEVIATIONS = [
    Deviation(
        "int16, uint16, uint32, uint64 and float8 in collectives",
        'refused: "Invalid scalar type"',
        "supported; float8 cannot be reduced",
        lambda case: case.dtype in NO_GLOO_TYPE,
        Case("broadcast", "int16", 5),
        refused="Invalid scalar type|not implemented for",
    ),
    Deviation(
        "complex arrays in gather",
        'refused: "Invalid scalar type"',
        "gathered, as everywhere else",
        lambda case: case.operation == "gather" and case.dtype in COMPLEX,
        Case("gather", "complex64", 5),
        refused="Invalid scalar type",
    ),
    Deviation(
        "PRODUCT of complex arrays",
        "refused",
        "multiplied",
        lambda case: case.op == "PRODUCT" and case.dtype in COMPLEX,
        Case("all_reduce", "complex64", 5, "PRODUCT"),
        refused="not support",
    ),
    Deviation(
        "AVG of integers",
        'refused: "result type Float can\'t be cast"',
        "the exact sum, divided and truncated toward zero",
        lambda case: case.op == "AVG" and case.dtype in INTEGERS,
        Case("all_reduce", "int64", 5, "AVG"),
        refused="result type Float can't be cast",
    ),
    Deviation(
        "strided views in all_reduce, reduce and broadcast",
        "silently wrong elements",
        "the right elements",
        lambda case: case.operation in IN_PLACE and case.layouts in SCATTERED,
        Case("all_reduce", "float32", 40, layouts=("steps",)),
    ),
    Deviation(
        "strided views in scatter and reduce_scatter",
        "silently wrong elements",
        "the right elements",
        lambda case: case.operation in ("scatter", "reduce_scatter") and case.layouts in SCATTERED,
        Case("scatter", "float32", 40, layouts=("steps",)),
    ),
    Deviation(
        "strided arrays of different sizes in reduce_scatter",
        "hangs",
        "the right elements",
        lambda case: case.operation == "reduce_scatter" and bool(case.lengths) and case.layouts in SCATTERED,
        Case("reduce_scatter", "float32", 4, layouts=("steps",), lengths=UNEVEN),
        asked=False,
    ),
    Deviation(
        "lists of arrays whose layouts differ between ranks",
        "hangs: some ranks refuse what others accept",
        "the right elements",
        lambda case: case.layouts == MIXED,
        Case("all_gather", "float32", 4, layouts=MIXED),
        asked=False,
    ),
    Deviation(
        "reduce: the arrays of the ranks that are not the destination",
        "overwritten with partial results",
        "kept",
        lambda case: case.operation == "reduce",
        Case("reduce", "float32", 40),
    ),
    Deviation(
        "all_gather of arrays of different sizes",
        'refused: "invalid tensor size"',
        "supported if every rank has the same list of sizes",
        lambda case: case.operation == "all_gather" and bool(case.lengths),
        Case("all_gather", "float32", 4, lengths=UNEVEN),
        refused="invalid tensor size",
    ),
    Deviation(
        "all_to_all of arrays of different sizes",
        'refused: "invalid tensor size"',
        "done, when each pair of ranks agrees on its size",
        lambda case: case.operation == "all_to_all" and bool(case.lengths),
        Case("all_to_all", "float32", 4, lengths=UNEVEN),
        refused="invalid tensor size",
    ),
    Deviation(
        "strided views in all_to_all_single",
        'refused: "Tensors must be contiguous"',
        "the right elements",
        lambda case: case.operation == "all_to_all_single" and case.layouts in NOT_CONTIGUOUS,
        Case("all_to_all_single", "float32", 4, layouts=("steps",)),
        refused="must be contiguous",
    ),
    Deviation(
        "strided views in send and recv",
        'refused: "input tensor has to be contiguous"',
        "the right elements",
        lambda case: case.operation == "ring" and case.layouts in NOT_CONTIGUOUS,
        Case("ring", "float32", 4, layouts=("steps",)),
        refused="has to be contiguous",
    ),
    Deviation(
        "NaN in MIN and MAX",
        "lost or kept, by the order of the ranks",
        "kept, whichever rank has it",
        lambda case: case.values == "nan",
        Case("all_reduce", "float32", 40, "MAX", values="nan"),
    ),
    Deviation(
        "0.0 and -0.0 in MIN and MAX",
        "either of them, by the order of the ranks",
        "-0.0 is the smaller one",
        lambda case: case.values == "zeros",
        Case("all_reduce", "float32", 40, "MIN", values="zeros"),
    ),
    Deviation(
        "sums of float16 and bfloat16",
        "rounded after each addition",
        "added in float32 and rounded once",
        lambda case: case.values == "halves",
        Case("all_reduce", "float16", 40, values="halves"),
    ),
    Deviation(
        "sums of bools",
        "a byte that is neither 0 nor 1, where several are True",
        "True if any element is True",
        lambda case: case.values == "truth",
        Case("all_reduce", "bool", 40, values="truth"),
    ),
]


def of(case: Case) -> list[Deviation]:
    """Return what torch may do otherwise in a case."""
    return [deviation for deviation in DEVIATIONS if deviation.applies(case)]


def page() -> str:
    """Return the text of docs/reference/deviations.md."""
    rows = [(entry.what, entry.torch, entry.ours) for entry in [*DEVIATIONS, *PROBES]]
    lines = [
        "# Differences from torch.distributed",
        "",
        "For all calls that both accept, procgroup returns the results of torch.distributed 2.13 with Gloo. The parity",
        "tests run the same programs on both, for every collective, element type, reduce op and layout. The table",
        "lists the exceptions, each observed in torch by a test. (Generated by tests/parity/deviations.py.)",
        "",
        "| what | torch 2.13 with Gloo | procgroup |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
