"""What is known of a job as text: one sentence for each thing that is wrong, a line for each rank, the stragglers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from procgroup.diagnostics.recorded_job import findings, stragglers
from procgroup.diagnostics.recorded_job.job import Job, Rank


def as_text(job: Job, found: Sequence[findings.Finding]) -> str:
    """Return all of it."""
    lines = [*sentences(job, found), "", *aligned(table(job))]
    costly = stragglers.costly(stragglers.find(job))
    if costly:
        lines += ["", *map(str, costly)]
    return "\n".join(lines)


def sentences(job: Job, found: Sequence[findings.Finding]) -> list[str]:
    """Return what is wrong, or that nothing is."""
    if found:
        return [finding.sentence for finding in found]
    if all(rank.state == "left" for rank in job.ranks):
        return [f"all {len(job.ranks)} ranks of job {job.name} left in order"]
    return [f"job {job.name}: no rank waits for another for long"]


def table(job: Job) -> list[tuple[str, ...]]:
    """Return the headings and a row for each rank."""
    rows: list[tuple[str, ...]] = [("rank", "host", "pid", "state", "where")]
    rows += [(str(rank.rank), rank.host, str(rank.pid), rank.state, _where(rank, now(job))) for rank in job.ranks]
    return rows


def now(job: Job) -> float:
    """Return the present where a rank lives, and otherwise when the last one ended."""
    return max(time.time() if rank.is_alive else rank.seen for rank in job.ranks)


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Return the rows of a table as lines; the columns ``right`` are aligned to the right, the last one not at all."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    widths[-1] = 0

    def cell(column: int, text: str) -> str:
        return text.rjust(widths[column]) if column in right else text.ljust(widths[column])

    return ["  ".join(cell(column, text) for column, text in enumerate(row)).rstrip() for row in rows]


def _where(rank: Rank, present: float) -> str:
    where = findings.place(rank, present if rank.is_alive else rank.seen)
    return f"{where}; reported {rank.report}" if rank.report else where
