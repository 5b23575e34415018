"""What is known of a job as text: one sentence for each thing that is wrong, a line for each rank, the stragglers."""

from __future__ import annotations

from collections.abc import Sequence

from procgroup.diagnostics.recorded_job import findings, stragglers
from procgroup.diagnostics.recorded_job.job import Job


def as_text(job: Job, found: Sequence[findings.JobFinding]) -> str:
    """Return all of it."""
    lines = [*sentences(job, found), "", *aligned(table(job))]
    costly = stragglers.costly(stragglers.find(job))
    if costly:
        lines += ["", *map(str, costly)]
    return "\n".join(lines)


def sentences(job: Job, found: Sequence[findings.JobFinding]) -> list[str]:
    """Return what is wrong, or that nothing is."""
    if found:
        return [finding.sentence for finding in found]
    if all(rank.state == "left" for rank in job.ranks):
        return [f"all {len(job.ranks)} ranks of job {job.name} left in order"]
    return [f"job {job.name}: no rank waits for another for long"]


def table(job: Job) -> list[tuple[str, ...]]:
    """Return the headings and a row for each rank."""
    rows: list[tuple[str, ...]] = [("rank", "host", "pid", "state", "where")]
    for rank in job.ranks:
        where = findings.place(rank, job.until(rank))
        reported = f"; reported {rank.report}" if rank.report else ""
        rows.append((str(rank.rank), rank.host, str(rank.pid), rank.state, where + reported))
    return rows


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Return the rows of a table as lines; the columns ``right`` are aligned to the right, the last one not at all."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    widths[-1] = 0

    def cell(column: int, text: str) -> str:
        return text.rjust(widths[column]) if column in right else text.ljust(widths[column])

    return ["  ".join(cell(column, text) for column, text in enumerate(row)).rstrip() for row in rows]
