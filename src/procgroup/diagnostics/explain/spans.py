"""The calls of a job as spans of OpenTelemetry: a trace for the job, a span for each rank, and in it one for each call.

The numbers of a trace and of its spans are made from the job and the calls, so that spans that are sent again, such as
those of a running job, take the place of the earlier ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from procgroup.diagnostics.recorded_job.job import Job, Rank, RecordedCall

_SCOPE = InstrumentationScope("procgroup")
_SPANS_OF_A_REQUEST = 512


def send(job: Job, exporter: SpanExporter | None = None) -> int:
    """Send the spans of a job, to where OTEL_EXPORTER_OTLP_ENDPOINT says; return how many.

    Raises ConnectionError when the receiver does not take them.
    """
    exporter = exporter or OTLPSpanExporter()
    found = list(spans(job))
    try:
        for first in range(0, len(found), _SPANS_OF_A_REQUEST):
            if exporter.export(found[first : first + _SPANS_OF_A_REQUEST]) is not SpanExportResult.SUCCESS:
                raise ConnectionError(f"the receiver took {first} of {len(found)} spans")
    finally:
        exporter.shutdown()
    return len(found)


def spans(job: Job) -> Iterator[Any]:
    """Yield the span of the job, those of the ranks, and those of the calls."""
    writer = _SpanWriter(job)
    yield writer.of_job()
    for rank in job.ranks:
        yield writer.of_rank(rank)
        yield from (writer.of_call(rank, call) for call in rank.calls)


class _SpanWriter:
    """Makes the spans of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._trace = _number(16, job.name, job.began)
        self._resources = {rank.rank: _resource(job, rank) for rank in job.ranks}

    def of_job(self) -> ReadableSpan:
        job = self._job
        return self._span(f"job {job.name}", job.ranks[0], (), None, job.began, job.now, {})

    def of_rank(self, rank: Rank) -> ReadableSpan:
        attributes = {"procgroup.state": rank.state}
        if rank.report:
            attributes["procgroup.report"] = rank.report
        failure = (rank.reason or rank.state) if rank.state in ("failed", "lost") else ""
        until = self._job.until(rank)
        return self._span(f"rank {rank.rank}", rank, (rank.rank,), (), rank.began, until, attributes, failure)

    def of_call(self, rank: Rank, call: RecordedCall) -> ReadableSpan:
        start = call.started or call.issued
        file, _, line = call.line.rpartition(":")
        attributes: dict[str, str | int | float] = {
            "procgroup.op": call.op,
            "procgroup.call": call.text,
            "procgroup.group": call.group.name,
            "procgroup.group_size": call.group.size,
            "procgroup.sequence": call.sequence,
            "procgroup.bytes": call.bytes,
            "procgroup.state": call.state,
            "procgroup.seconds_before_start": start - call.issued,
        }
        if call.peer >= 0:
            attributes["procgroup.peer"] = call.peer
        if line.isdecimal():
            attributes |= {"code.file.path": file, "code.line.number": int(line)}
        identity = (rank.rank, call.group.key, call.record_index)
        failure = f"{call.name} failed" if call.state == "failed" else ""
        end = call.ended or max(self._job.until(rank), start)
        return self._span(call.op, rank, identity, (rank.rank,), start, end, attributes, failure)

    def _span(
        self,
        name: str,
        rank: Rank,
        identity: tuple[object, ...],
        parent: tuple[object, ...] | None,
        start: float,
        end: float,
        attributes: dict[str, Any],
        failure: str = "",
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context=self._context(identity),
            parent=None if parent is None else self._context(parent),
            resource=self._resources[rank.rank],
            attributes=attributes,
            status=Status(StatusCode.ERROR, failure) if failure else Status(),
            start_time=round(start * 1e9),
            end_time=round(end * 1e9),
            instrumentation_scope=_SCOPE,
        )

    def _context(self, identity: tuple[object, ...]) -> SpanContext:
        return SpanContext(self._trace, _number(8, self._trace, *identity), False, TraceFlags(TraceFlags.SAMPLED))


def _resource(job: Job, rank: Rank) -> Resource:
    return Resource(
        {
            "service.name": "procgroup",
            "service.instance.id": f"{job.name}/{rank.rank}",
            "host.name": rank.host,
            "process.pid": rank.pid,
            "process.command_line": rank.program,
            "procgroup.job": job.name,
            "procgroup.rank": rank.rank,
            "procgroup.world_size": rank.world_size,
        }
    )


def _number(size: int, *parts: object) -> int:
    """Return a number of so many bytes that is not 0, the same for the same parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:size], "big") or 1
