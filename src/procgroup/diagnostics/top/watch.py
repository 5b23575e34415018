"""Looks at the flight records of a job again and again, what has changed between two looks, and that as plain text.

A look only reads the records' files, which costs the ranks nothing. A rank is made to write its Python stack only where
it is in no call and others have waited for it for more than 1 s, and no more often than every 2 s.

A look reads the newest calls of each rank. All recorded calls are needed to find what is wrong and which rank is slow.
With 8 ranks that takes ten times as long, so it is done every 2 s, and every second where something may be wrong.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from procgroup.diagnostics.recorded_job import findings, reading, stragglers, text
from procgroup.diagnostics.recorded_job.findings import JobFinding, duration
from procgroup.diagnostics.recorded_job.job import Job, Rank, RecordedCall
from procgroup.diagnostics.recorded_job.stragglers import Straggler

SECONDS_BETWEEN_STACKS = 2.0
_SECONDS_BETWEEN_STUDIES = 2.0
_SECONDS_WHERE_IT_MAY_BE_WRONG = 1.0
# A live rank that has been in a call for longer may wait for another one in vain.
_USUAL_SECONDS = 1.0
_NEWEST_CALLS = 256


HEADINGS = ("rank", "state", "call", "for", "calls/s", "bytes/s", "waits", "reported")
TO_THE_RIGHT = (0, 3, 4, 5, 6)
"""The columns that are aligned to the right: numbers."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


class Row(NamedTuple):
    """One rank. ``waited`` has the seconds since its call began, None in no call; rates are None at the first look."""

    rank: int
    state: str
    where: str
    waited: float | None
    calls_per_second: float | None
    bytes_per_second: float | None
    waiting_share: float
    report: str
    is_slowest: bool
    is_cause: bool


class Look(NamedTuple):
    """A job as it was at one moment."""

    job: Job
    found: list[JobFinding]
    rows: list[Row]
    stragglers: list[Straggler]

    @property
    def has_ended(self) -> bool:
        """Whether no rank lives any more."""
        return not self.job.is_alive

    @property
    def seconds(self) -> float:
        """How long the job has run."""
        return self.job.now - self.job.began


class JobWatch:
    """Looks at one job. The caller decides when, and how many calls of each rank a look has at least."""

    def __init__(self, directory: Path, *, newest: int = _NEWEST_CALLS) -> None:
        self._directory = directory
        self._newest = newest
        self._counts: dict[int, tuple[float, int]] = {}
        self._stacks_due = 0.0
        self._studied = -math.inf
        self._found: list[JobFinding] = []
        self._stragglers: list[Straggler] = []
        self._shares: dict[int, float] = {}
        self._slowest: int | None = None

    def look(self, *, study: bool = False) -> Look:
        """Read the records. Raises LookupError where there is none any more.

        Who waits for whom, and what is wrong, is studied every 2 s at most, and with ``study`` now.
        """
        job = reading.load(self._directory, with_stacks=False, newest=self._newest)
        moment = time.monotonic()
        pause = _SECONDS_WHERE_IT_MAY_BE_WRONG if _may_be_wrong(job) else _SECONDS_BETWEEN_STUDIES
        if study or moment >= self._studied + pause or not job.is_alive:
            self._studied = moment
            if self._newest < reading.RECORDED_CALLS:
                job, moment = reading.load(self._directory, with_stacks=False), time.monotonic()
            self._study(job)
            self._request_stacks(job, moment)
        causes = {number for finding in self._found for number in finding.ranks}
        rows = [self._row(job, rank, causes, moment) for rank in job.ranks]
        return Look(job, self._found, rows, self._stragglers)

    def _study(self, job: Job) -> None:
        self._found = findings.find(job)
        counted = stragglers.find(job)
        self._stragglers = stragglers.costly(counted)
        self._shares, self._slowest = stragglers.waiting_shares(job, counted), stragglers.slowest(counted)

    def _request_stacks(self, job: Job, moment: float) -> None:
        awaited = {number for finding in self._found if finding.waiting for number in finding.ranks}
        idle = [rank.rank for rank in job.ranks if rank.rank in awaited and rank.state == "running" and not rank.call]
        if idle and moment >= self._stacks_due:
            self._stacks_due = moment + SECONDS_BETWEEN_STACKS
            reading.request_stacks(self._directory, idle)

    def _row(self, job: Job, rank: Rank, causes: set[int], moment: float) -> Row:
        calls, size = self._rates(rank, moment)
        return Row(
            rank=rank.rank,
            state=rank.state,
            where=_where(rank),
            waited=job.now - rank.call.started if rank.is_alive and rank.call else None,
            calls_per_second=calls,
            bytes_per_second=size,
            waiting_share=self._shares.get(rank.rank, 0.0),
            report=rank.report,
            is_slowest=rank.rank == self._slowest,
            is_cause=rank.rank in causes,
        )

    def _rates(self, rank: Rank, moment: float) -> tuple[float | None, float | None]:
        """Return calls and bytes a second since the last look."""
        before = self._counts.get(rank.rank)
        self._counts[rank.rank] = moment, rank.recorded
        if before is None:
            return None, None
        seconds, calls = moment - before[0], max(rank.recorded - before[1], 0)
        held = rank.calls[-calls:] if calls else []
        # Where more calls came than were read, the others are taken to be like these.
        size = sum(call.bytes for call in held) * (calls / len(held) if held else 0)
        return calls / seconds, size / seconds


def _may_be_wrong(job: Job) -> bool:
    return any(
        rank.state != "running" or (rank.call is not None and job.now - rank.call.started >= _USUAL_SECONDS)
        for rank in job.ranks
    )


def _where(rank: Rank) -> str:
    if rank.call is not None:
        return _short(rank.call)
    if rank.current_stack:
        return findings.place(rank, rank.seen)
    return f"after {_short(rank.last)}" if rank.last is not None else "no call yet"


def _short(call: RecordedCall) -> str:
    """Return "all_reduce #2 at train.py:12"; the default group's name is left out."""
    name = f"{call.op} #{call.sequence}" if call.group.name == "0" else call.name
    return f"{name}{findings.at(call)}"


def plain(look: Look) -> str:
    """Return everything as text."""
    rows = [HEADINGS, *map(cells, look.rows)]
    wrong = [f"! {finding.sentence}" for finding in look.found]
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
