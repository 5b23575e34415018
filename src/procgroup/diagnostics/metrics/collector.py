"""The metrics of all jobs of this host that run, or ended a short while ago, by the flight records of their ranks.

The number of time series is bounded: per rank by the number of operations and by what fits in a report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from procgroup.diagnostics.metrics.totals import Totals
from procgroup.diagnostics.recorded_job import findings, reading, stragglers
from procgroup.diagnostics.recorded_job.job import Job, Rank

# So long the end of a job can be scraped.
KEPT_SECONDS = 300.0
_STATES = ("running", "stopped", "left", "failed", "lost")
_RANK = ("job_name", "rank")

_COUNTERS = {
    "procgroup_calls": "Calls that have ended.",
    "procgroup_bytes": "Bytes that this rank has passed to calls that have ended.",
    "procgroup_call_seconds": "Seconds in calls that have ended, waiting for other ranks included.",
}
_GAUGES = {
    "procgroup_problems": ("Things that are wrong in a job, as procgroup explain has them.", ("job_name",)),
    "procgroup_rank_state": ("1 for the state that the rank is in, 0 for the others.", (*_RANK, "state")),
    "procgroup_running_call_seconds": ("Seconds since the call began that the rank is in; 0 in no call.", _RANK),
    "procgroup_last_call_timestamp_seconds": ("When the rank's last call ended, as Unix time.", _RANK),
    "procgroup_waiting_ratio": ("Share of the rank's time that it waits for others, over its newest calls.", _RANK),
    "procgroup_reported": ("A number that the rank has reported by procgroup.report.", (*_RANK, "name")),
}

_Families = dict[str, Any]


class JobsCollector(Collector):  # type: ignore[misc, unused-ignore]  # where prometheus_client is not installed
    """Reads the records whenever the metrics are asked for."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, int], Totals] = {}
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Any]:
        """Return the metrics without values, so that to register this reads no record."""
        return _families().values()

    def collect(self) -> Iterable[Any]:
        """Return the metrics."""
        with self._lock:
            families, jobs = _families(), {job.name: job for job in _recent_jobs()}
            for job in jobs.values():
                self._add(families, job)
            ranks = {(job.name, rank.rank) for job in jobs.values() for rank in job.ranks}
            self._totals = {key: totals for key, totals in self._totals.items() if key in ranks}
        return families.values()

    def _add(self, families: _Families, job: Job) -> None:
        families["procgroup_problems"].add_metric((job.name,), len(findings.find(job)))
        shares = stragglers.waiting_shares(job, stragglers.find(job))
        for rank in job.ranks:
            self._count(families, job, rank)
            labels = (job.name, str(rank.rank))
            for state in _STATES:
                families["procgroup_rank_state"].add_metric((*labels, state), state == rank.state)
            running = job.now - rank.call.started if rank.is_alive and rank.call else 0.0
            families["procgroup_running_call_seconds"].add_metric(labels, max(running, 0.0))
            if rank.last is not None:
                families["procgroup_last_call_timestamp_seconds"].add_metric(labels, rank.last.ended)
            families["procgroup_waiting_ratio"].add_metric(labels, shares.get(rank.rank, 0.0))
            for name, value in reported_numbers(rank.report).items():
                families["procgroup_reported"].add_metric((*labels, name), value)

    def _count(self, families: _Families, job: Job, rank: Rank) -> None:
        totals = self._totals.setdefault((job.name, rank.rank), Totals()).count(rank)
        for op, total in totals.items():
            labels = (job.name, str(rank.rank), op)
            for name, value in zip(_COUNTERS, total, strict=True):
                families[name].add_metric(labels, value)


def reported_numbers(report: str) -> dict[str, float]:
    """Return the numbers of a report: {"step": 3.0, "loss": 0.25} of "step 3, loss 0.25, phase warm-up"."""
    found = {}
    for part in report.split(", "):
        name, _, value = part.rpartition(" ")
        try:
            found[name] = float(value)
        except ValueError:
            continue
    found.pop("", None)
    return found


def _families() -> _Families:
    counters = {name: CounterMetricFamily(name, text, labels=(*_RANK, "op")) for name, text in _COUNTERS.items()}
    gauges = {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in _GAUGES.items()}
    return counters | gauges


def _recent_jobs() -> Iterator[Job]:
    """Return the jobs, the newest last: of several with one name that one counts."""
    for directory in reversed(reading.jobs()):
        try:
            job = reading.load(directory, with_stacks=False)
        except LookupError:  # removed meanwhile, or of another version
            continue
        if job.is_alive or time.time() - job.now < KEPT_SECONDS:
            yield job
