"""One program, written once, that plays cases on torch.distributed or on procgroup, on torch tensors or NumPy arrays.

Each rank reports for each case what is wrong with its arrays ("" when they are what NumPy says) or, when the call was
refused, the exception's type and text. The arrays that must not change are looked at too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from seeded_cases import Case, CasePart


@dataclass(frozen=True)
class Report:
    """What one rank saw of one case. Both are "" when all was right."""

    wrong: str = ""
    refused: str = ""


def play_cases(
    dist: Any, part_of: type[CasePart], rank: int, size: int, cases: Sequence[Case], log: Callable[[str], None]
) -> list[Report]:
    """Play cases one after the other, blocking and async by turns."""
    reports = []
    for number, case in enumerate(cases):
        log(str(case))
        reports.append(_play(dist, part_of(case, rank, size), async_op=bool(number % 2)))
    return reports


def _play(dist: Any, part: CasePart, async_op: bool) -> Report:
    part.receives_from_any = False  # Gloo never ends such a receive of no elements
    part.is_flat = part.name.endswith("_single")  # torch looks at the shapes
    try:
        part.start(dist, async_op)
        part.wait()
    except (RuntimeError, ValueError, TypeError) as error:
        return Report(refused=f"{type(error).__name__}: {error}")
    return Report(wrong=part.wrong())
