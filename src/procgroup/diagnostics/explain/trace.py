"""The calls of a job as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show: a track for each group.

Source: the Trace Event Format, JSON object form, with complete events ("ph": "X") in microseconds.
"""

from __future__ import annotations

from typing import Any

from procgroup.diagnostics.recorded_job.job import Job


def trace(job: Job) -> dict[str, Any]:
    """Return the trace as a JSON object. A call that has not ended lasts until its rank was last seen."""
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
