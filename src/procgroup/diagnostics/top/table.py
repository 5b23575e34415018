"""What ``procgroup top`` shows, as plain text: the header, what is wrong, and a row for each rank."""

from __future__ import annotations

from collections import Counter

from procgroup.diagnostics.recorded_job import text
from procgroup.diagnostics.recorded_job.findings import duration
from procgroup.diagnostics.top.watch import Look, Row

HEADINGS = ("rank", "state", "call", "for", "calls/s", "bytes/s", "waits", "reported")
TO_THE_RIGHT = (0, 3, 4, 5, 6)
"""The columns that are aligned to the right: numbers."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


def plain(look: Look) -> str:
    """Return everything as text."""
    rows = [HEADINGS, *map(cells, look.rows)]
    wrong = [f"! {sentence}" for sentence in wrong_sentences(look)]
    return "\n".join([*header(look), *wrong, "", *text.aligned(rows, right=TO_THE_RIGHT)])


def header(look: Look) -> list[str]:
    """Return two lines: the job with its program; its ranks, and for how long it has run."""
    job = look.job
    counts = Counter(rank.state for rank in job.ranks)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    hosts = ", ".join(dict.fromkeys(rank.host for rank in job.ranks))
    known = "" if len(job.ranks) == job.world_size else f", {len(job.ranks)} of them recorded here"
    ranks = "1 rank" if job.world_size == 1 else f"{job.world_size} ranks"
    ran = "ran for" if look.has_ended else "running for"
    return [
        f"job {job.name}: {job.ranks[0].program}",
        f"{ranks}{known} on {hosts}: {states}; {ran} {duration(look.seconds)}",
    ]


def wrong_sentences(look: Look) -> list[str]:
    """Return a sentence for each thing that is wrong."""
    return [finding.sentence for finding in look.found]


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a rank's row."""
    return (
        str(row.rank),
        "slowest" if row.is_slowest and row.state == "running" else row.state,
        row.where,
        "" if row.waited is None else duration(row.waited),
        "" if row.calls_per_second is None else _count(row.calls_per_second),
        "" if row.bytes_per_second is None else _bytes(row.bytes_per_second),
        f"{100 * row.waiting_share:.0f} %",
        row.report,
    )


def _count(number: float) -> str:
    return f"{number:.1f}" if 0 < number < 100 else f"{number:.0f}"


def _bytes(number: float) -> str:
    unit = 0
    while number >= 999.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {_UNITS[unit]}" if number < 999.5 else f"{number:.0f} {_UNITS[unit]}"
