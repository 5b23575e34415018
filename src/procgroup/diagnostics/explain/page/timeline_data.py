"""The calls of a job as the JSON that the page's script reads: small, and safe inside of an HTML page."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from procgroup.diagnostics.explain.recorded_job import Call, Group, Job, Rank
from procgroup.diagnostics.explain.text import now

_STATES = ("completed", "started", "failed", "issued")
# JSON has these in texts only. A script element ends at "</script", whatever its type is.
_ESCAPES = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026"})

_Lane = dict[str, Any]


def operations(job: Job) -> list[tuple[str, int]]:
    """Return the operations with the number of their calls, most calls first: their order chooses their colours."""
    return Counter(call.op for rank in job.ranks for call in rank.calls).most_common()


def timeline_data(job: Job) -> str:
    """Return a lane for each rank and group, with its calls as arrays. Times are microseconds since the first call."""
    first = min((call.issued for rank in job.ranks for call in rank.calls if call.issued), default=0.0)
    writer = _Writer([name for name, _ in operations(job)], first)
    lanes = [lane for rank in job.ranks for lane in writer.lanes(rank, now(job) if rank.is_alive else rank.seen)]
    messages = {call.op for rank in job.ranks for call in rank.calls if call.is_message}
    content = {
        "ops": writer.ops,
        "messages": [writer.ops.index(op) for op in messages],
        "texts": list(writer.texts),
        "lanes": lanes,
    }
    return json.dumps(content, separators=(",", ":")).translate(_ESCAPES)


class _Writer:
    """Numbers the texts, which repeat, and turns calls into arrays."""

    def __init__(self, ops: list[str], first: float) -> None:
        self.ops = ops
        self.texts: dict[str, int] = {}
        self._first = first
        self._numbers = {op: number for number, op in enumerate(ops)}

    def lanes(self, rank: Rank, until: float) -> list[_Lane]:
        """Return the lanes of a rank, one for each group, the largest first."""
        calls: dict[Group, list[Call]] = {}
        for call in rank.calls:
            calls.setdefault(call.group, []).append(call)
        return [
            {
                "rank": rank.rank,
                "group": group.name,
                "key": group.key,
                "size": group.size,
                "until": self._time(until),
                "calls": sorted(map(self._call, of_group), key=lambda call: call[0] or 0.0),
            }
            for group, of_group in sorted(calls.items(), key=lambda lane: (-lane[0].size, lane[0].key))
        ] or [{"rank": rank.rank, "group": "", "key": "", "size": 0, "until": self._time(until), "calls": []}]

    def _call(self, call: Call) -> tuple[float | int | None, ...]:
        start = call.started or call.issued
        return (
            self._time(start),
            self._time(call.ended) if call.ended else None,
            self._numbers[call.op],
            self.texts.setdefault(call.text, len(self.texts)),
            self.texts.setdefault(call.line, len(self.texts)),
            _STATES.index(call.state),
            call.sequence,
            round((start - call.issued) * 1e6, 1),
        )

    def _time(self, moment: float) -> float:
        return round((moment - self._first) * 1e6, 1)
