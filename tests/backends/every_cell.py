"""Makes the call of every row of the capability table, and compares what becomes of it with the row."""

from __future__ import annotations

from typing import Any

from seeded_cases import Case, CasePart

import oracle
import procgroup as dist
from procgroup.backends import Capability, capabilities
from procgroup.errors import DistError

COUNT = 50
"""More elements than fit beside an announcement, so that the backend moves them."""


class Cell(CasePart):
    """One rank's part in the call of a row."""

    def __init__(self, row: Capability, rank: int, size: int) -> None:
        operation = "ring" if row.operation in ("send", "recv") else row.operation
        is_premultiplied = row.reduce_op == "PREMUL_SUM"
        op = "SUM" if is_premultiplied or not row.reduce_op else row.reduce_op
        super().__init__(Case(operation, row.dtype or "uint8", COUNT, op), rank, size)
        if is_premultiplied:
            self.op = dist.ReduceOp.PREMUL_SUM(1.0)

    def combined(self, blocks: Any) -> oracle.Array:
        return oracle.combined(self.case.op, blocks) if self.case.is_defined else blocks[0]


def make_every_call(rank: int, size: int, backend: str) -> list[str]:
    """Return what differs from the table on this rank."""
    dist.init_process_group(backend, timeout=20)
    differences = []
    for row in capabilities(backend, "cpu"):
        cell, refusal = Cell(row, rank, size), ""
        try:
            cell.start(dist)
        except (TypeError, ValueError, DistError) as error:
            refusal = f"{type(error).__name__}: {error}"
        wrong = cell.wrong() if row.is_supported and not refusal else ""
        if bool(refusal) == row.is_supported or wrong:
            differences.append(f"{row}: {refusal or wrong or 'not refused'}")
    dist.destroy_process_group()
    return differences
