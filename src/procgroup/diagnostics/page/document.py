"""Pages that need nothing else: HTML with its style, its script and its data in it; and their timeline of calls.

Every text of a record is escaped, because a program's name or a report may hold anything. Moreover a page forbids the
browser all but its own script and style, which it names by their hashes (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from procgroup.diagnostics.recorded_job.job import Job, Rank, RecordedCall, RecordedGroup

_HERE = Path(__file__).parent
STYLE = _HERE / "page.css"
TIMELINE_SCRIPTS = (_HERE / "calls.js", _HERE / "timeline.js", _HERE / "moving.js")

# JSON has these in texts only. A script element ends at "</script", whatever its type is.
_ESCAPES = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026"})


_STATES = ("completed", "started", "failed", "issued", "queued")
_KEYS = {
    "wheel": "zoom",
    "drag": "move",
    "← →": "the calls of a lane",
    "↑ ↓": "lanes",
    "+ -": "zoom",
    "0": "everything",
    "n": "next running or failed call",
}

_Lane = dict[str, Any]


class Page:
    """A kind of page: its style, its script, and what it is allowed to do besides, such as "connect-src 'self'"."""

    def __init__(self, scripts: Sequence[Path], *, also_allowed: str = "") -> None:
        self._style, self._script = _text(STYLE), "".join(map(_text, scripts))
        self.policy: str = "; ".join(
            [
                "default-src 'none'",
                f"script-src {_hash(self._script)}",
                f"style-src {_hash(self._style)}",
                *([also_allowed] if also_allowed else []),
                "base-uri 'none'",
                "form-action 'none'",
            ]
        )

    def html(self, title: str, body: str, data: Any) -> str:
        """Return a page with this body, which is HTML, whose script finds ``data`` as JSON in the element "data"."""
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{self.policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{self._style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{as_json(data)}</script>
<script>{self._script}</script>
</body>
</html>
"""


def as_json(data: Any) -> str:
    """Return the data as JSON that is safe inside of an HTML page, too."""
    return json.dumps(data, separators=(",", ":")).translate(_ESCAPES)


def table(label: str, headings: Iterable[str], rows: Iterable[str], *, numbers: Sequence[str] = ()) -> str:
    """Return a table that scrolls where it is too large, also by keys. The columns ``numbers`` are so aligned."""
    head = "".join(f'<th scope="col"{" class=number" if one in numbers else ""}>{one}</th>' for one in headings)
    body = "\n".join(rows)
    return (
        f'<div class="table {label}" tabindex="0" role="region" aria-labelledby="{label}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def timeline(*, is_live: bool = False) -> str:
    """Return the timeline's elements as HTML; a live one can follow the present."""
    keys = _KEYS | ({"f": "follow the present"} if is_live else {})
    follow = '<button type="button" data-do="follow" aria-pressed="true">Follow</button>\n' if is_live else ""
    described = " &middot; ".join(f"<kbd>{key}</kbd> {what}" for key, what in keys.items())
    return f"""<h2 id="timeline">Timeline</h2>
<div class="tools" role="toolbar" aria-label="View of the timeline">
<button type="button" data-do="out" aria-label="Zoom out" title="Zoom out">&minus;</button>
<button type="button" data-do="in" aria-label="Zoom in" title="Zoom in">+</button>
<button type="button" data-do="left" aria-label="Earlier" title="Earlier">&larr;</button>
<button type="button" data-do="right" aria-label="Later" title="Later">&rarr;</button>
<button type="button" data-do="all">Everything</button>
{follow}<button type="button" data-do="next">Next running or failed call</button>
</div>
<ul class="legend" id="legend">
<li><span class="swatch waited"></span>waited for the last rank</li>
<li><span class="swatch open"></span>has not ended; in red: for 1 s</li>
<li><span class="swatch bad"></span>failed</li>
<li><span class="swatch gap"></span>not in the records</li>
</ul>
<div class="timeline">
<div class="lanes" id="lanes"><canvas tabindex="0" role="application" aria-roledescription="timeline"
aria-label="The calls of all ranks, a lane for each rank and group" aria-describedby="keys"></canvas><div
id="height"></div></div>
<div class="call" id="call" role="status" hidden></div>
</div>
<p class="help" id="keys">{described}</p>
<noscript><p class="help">The timeline needs JavaScript.</p></noscript>"""


def first_issued(job: Job) -> float:
    """Return when the first recorded call was issued; 0.0 where there is none."""
    return min((call.issued for rank in job.ranks for call in rank.calls if call.issued), default=0.0)


def timeline_data(job: Job, origin: float, *, moment: float, since: float = -math.inf) -> dict[str, Any]:
    """Return the calls of a job that have not ended, or ended after ``since``, in lanes, as arrays.

    ``moment`` is when the records were read. Times are microseconds since ``origin``.
    """
    operations = Counter(call.op for rank in job.ranks for call in rank.calls)
    writer = _Writer([name for name, _ in operations.most_common()], origin, since)
    lanes = [lane for rank in job.ranks for lane in writer.lanes(rank, job.until(rank))]
    messages = {call.op for rank in job.ranks for call in rank.calls if call.is_message}
    return {
        "now": writer.time(moment),
        "ops": writer.ops,
        "messages": [writer.ops.index(op) for op in messages],
        "texts": list(writer.texts),
        "lanes": lanes,
    }


class _Writer:
    """Numbers the texts, which repeat, and turns calls into arrays."""

    def __init__(self, ops: list[str], origin: float, since: float) -> None:
        self.ops = ops
        self.texts: dict[str, int] = {}
        self._origin, self._since = origin, since
        self._numbers = {op: number for number, op in enumerate(ops)}

    def lanes(self, rank: Rank, until: float) -> list[_Lane]:
        """Return the lanes of a rank, one for each group, the largest first."""
        calls: dict[RecordedGroup, list[RecordedCall]] = {}
        for call in rank.calls:
            calls.setdefault(call.group, []).append(call)
        return [
            self._lane(rank, group, of_group, until)
            for group, of_group in sorted(calls.items(), key=lambda lane: (-lane[0].size, lane[0].key))
        ] or [self._lane(rank, RecordedGroup("", "", 0, ()), [], until)]

    def _lane(self, rank: Rank, group: RecordedGroup, calls: list[RecordedCall], until: float) -> _Lane:
        fresh = [self._call(call) for call in calls if not call.ended or call.ended > self._since]
        return {
            "rank": rank.rank,
            "group": group.name,
            "key": group.key,
            "size": group.size,
            "until": self.time(until),
            "whole": self.time(rank.whole_since) if rank.whole_since else None,
            "calls": sorted(fresh, key=lambda call: call[0] or 0.0),
        }

    def _call(self, call: RecordedCall) -> tuple[float | int | None, ...]:
        start = call.started or call.issued
        return (
            self.time(start),
            self.time(call.ended) if call.ended else None,
            self._numbers[call.op],
            self.texts.setdefault(call.text, len(self.texts)),
            self.texts.setdefault(call.line, len(self.texts)),
            _STATES.index(call.state),
            call.sequence,
            round((start - call.issued) * 1e6, 1),
            call.record_index,
        )

    def time(self, moment: float) -> float:
        """Return a moment as it is in the data."""
        return round((moment - self._origin) * 1e6, 1)
