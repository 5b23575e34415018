"""The command ``procgroup explain``: one sentence for each thing that is wrong in a job, then a line for each rank."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from procgroup.diagnostics.explain.page import page
from procgroup.diagnostics.recorded_job import findings, reading, stragglers
from procgroup.diagnostics.recorded_job.job import Job
from procgroup.diagnostics.recorded_job.text import as_text

FLAGS = {
    "--list": "list the recorded jobs, the newest first, and end",
    "--json": "print everything as JSON",
    "--html": "write a page with a timeline of all calls, too, which needs nothing else",
    "--trace": "write a trace of all calls for ui.perfetto.dev, too",
    "--otlp": "send all calls as spans of OpenTelemetry, too, to OTEL_EXPORTER_OTLP_ENDPOINT or this host's port 4318",
}
_WITH_FILE = ("--html", "--trace")


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0 when nothing is wrong in the job, 1 when something is, 2 when the command fails."""
    options = _parser().parse_args(arguments)
    if options.list:
        print("\n".join(_line_of(path) for path in reading.jobs()) or "no job is recorded")
        return 0
    try:
        job = reading.load(reading.find(options.job))
    except LookupError as error:
        print(f"procgroup explain: {error.args[0]}", file=sys.stderr)
        return 2
    found = findings.find(job)
    if options.html:
        Path(options.html).write_text(page(job, found), encoding="utf-8")
    if options.trace:
        Path(options.trace).write_text(json.dumps(trace(job)))
    if options.otlp and not _send_spans(job):
        return 2
    print(json.dumps(_as_json(job, found), indent=2) if options.json else as_text(job, found))
    return 1 if found else 0


def _send_spans(job: Job) -> bool:
    try:
        from procgroup.diagnostics.explain.spans import send

        send(job)
    except ImportError:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        why = f"opentelemetry is not installed; install it with: pip install {packages}"
    except ConnectionError as error:
        why = f"{error.args[0]}; OTEL_EXPORTER_OTLP_ENDPOINT says where it is"
    else:
        return True
    print(f"procgroup explain: {why}", file=sys.stderr)
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="procgroup explain",
        description="Report the state of a job's ranks, live or at its end, from the flight records of this host. "
        "Exit status: 0 without a problem, 1 with a problem, 2 if the job does not exist, or its spans were not "
        "received.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        default="",
        metavar="JOB",
        help="a job: the beginning of its name, its run id, or a directory of records; by default the newest",
    )
    for flag, text in FLAGS.items():
        if flag in _WITH_FILE:
            parser.add_argument(flag, metavar="FILE", help=text)
        else:
            parser.add_argument(flag, action="store_true", help=text)
    return parser


def _line_of(path: Path) -> str:
    name = path.name
    try:
        job = reading.load(path, with_stacks=False)
    except LookupError as error:
        return f"{name}  {error.args[0]}"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.began))
    states = sorted({rank.state for rank in job.ranks})
    label = f" {job.name}" if job.name != name else ""
    ranks = f"{len(job.ranks)} of {job.world_size} ranks"
    return f"{name}{label}  {began}  {ranks}  {', '.join(states)}  {job.ranks[0].program}"


def _as_json(job: Job, found: Sequence[findings.JobFinding]) -> dict[str, Any]:
    return {
        "job": job.name,
        "directory": str(job.directory),
        "world_size": job.world_size,
        "findings": [finding._asdict() for finding in found],
        "stragglers": [one._asdict() for one in stragglers.find(job)],
        "ranks": [
            {**rank._asdict(), "calls": [{**call._asdict(), "group": call.group._asdict()} for call in rank.calls]}
            for rank in job.ranks
        ],
    }


def trace(job: Job) -> dict[str, Any]:
    """Return the calls as a trace that ui.perfetto.dev and chrome://tracing show, with a track for each group.

    A call that has not ended lasts until its rank was last seen. Source: the Trace Event Format, JSON object form, with
    complete events ("ph": "X") in microseconds.
    """
    times = [call.issued for rank in job.ranks for call in rank.calls if call.issued]
    began = min(times, default=0.0)
    tracks = sorted({call.group.key for rank in job.ranks for call in rank.calls})
    events: list[dict[str, Any]] = []
    for rank in job.ranks:
        name = f"rank {rank.rank} ({rank.host})"
        events.append({"ph": "M", "name": "process_name", "pid": rank.rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank.rank, "args": {"sort_index": rank.rank}})
        for group in {call.group for call in rank.calls}:
            track = {"ph": "M", "name": "thread_name", "pid": rank.rank, "tid": tracks.index(group.key)}
            events.append({**track, "args": {"name": f"group {group.name}"}})
        for call in rank.calls:
            start = call.started or call.issued
            end = call.ended or max(rank.seen, start)
            events.append(
                {
                    "ph": "X",
                    "name": f"{call.op} #{call.sequence}",
                    "cat": "message" if call.is_message else "collective",
                    "pid": rank.rank,
                    "tid": tracks.index(call.group.key),
                    "ts": (start - began) * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {
                        "call": call.text,
                        "line": call.line,
                        "state": call.state,
                        "bytes": call.bytes,
                        "waited for its turn (us)": (start - call.issued) * 1e6,
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
