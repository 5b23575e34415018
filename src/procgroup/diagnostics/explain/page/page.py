"""One page that shows all that is known of a job, and needs nothing else: it works offline, and from a mail.

Every text of a record is escaped, because a program's name or a report may hold anything. Moreover the page forbids the
browser all but its own script and style, which it names by their hashes (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from procgroup.diagnostics.explain import stragglers, text
from procgroup.diagnostics.explain.findings import Finding, duration
from procgroup.diagnostics.explain.page.timeline_data import operations, timeline_data
from procgroup.diagnostics.explain.recorded_job import Job, Rank

_SCRIPTS = ("calls.js", "timeline.js", "moving.js")
_KEYS = {
    "wheel": "zoom",
    "drag": "move",
    "← →": "the calls of a lane",
    "↑ ↓": "lanes",
    "+ -": "zoom",
    "0": "everything",
    "n": "next running or failed call",
}


def page(job: Job, found: Sequence[Finding]) -> str:
    """Return the page as HTML."""
    style, script = _file("page.css"), "".join(map(_file, _SCRIPTS))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(job.name)}: procgroup explain</title>
<style>{style}</style>
</head>
<body>
{_header(job, found)}
<main>
{_ranks(job)}
{_stragglers(job)}
{_timeline(job)}
</main>
<footer>Written by procgroup explain. Times are those of the clocks of the ranks' hosts.</footer>
<script type="application/json" id="calls">{timeline_data(job)}</script>
<script>{script}</script>
</body>
</html>
"""


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _header(job: Job, found: Sequence[Finding]) -> str:
    present = text.now(job)
    began = min(rank.began for rank in job.ranks)
    hosts = ", ".join(dict.fromkeys(rank.host for rank in job.ranks))
    ranks = "1 rank" if job.world_size == 1 else f"{job.world_size} ranks"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    ran = "running for" if any(rank.is_alive for rank in job.ranks) else "ran for"
    sentences = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in text.sentences(job, found))
    return f"""<header>
<h1>{escape(job.name)}</h1>
<p><code>{escape(job.ranks[0].program)}</code></p>
<p>{ranks} on {escape(hosts)}; began {started}, {ran} {duration(present - began)}</p>
<ul class="findings{" wrong" if found else ""}" aria-label="What is wrong">
{sentences}
</ul>
</header>"""


def _ranks(job: Job) -> str:
    headings, *rows = text.table(job)
    cells = [_row_of_rank(rank, row) for rank, row in zip(job.ranks, rows, strict=True)]
    return f'<h2 id="ranks">Ranks</h2>\n{_table("ranks", headings, cells)}'


def _row_of_rank(rank: Rank, row: Sequence[str]) -> str:
    number, host, pid, state, where = map(escape, row)
    details = ""
    if rank.stack:
        stack = "\n".join(map(escape, rank.stack))
        details = f"<details><summary>Python stack</summary><pre>{stack}</pre></details>"
    return (
        f'<tr><td class="number">{number}</td><td>{host}</td><td class="number">{pid}</td>'
        f'<td><span class="state {escape(rank.state)}">{state}</span></td><td class="wide">{where}{details}</td></tr>'
    )


def _stragglers(job: Job) -> str:
    costly = [one for one in stragglers.find(job) if one.share >= stragglers.NOTICEABLE_SHARE]
    if not costly:
        return ""
    headings = ("rank", "operation", "last in", "the others wait", "of their time", "")
    rows = [
        f'<tr><td class="number">{one.rank}</td><td>{escape(one.op)}</td><td>{one.last} of {one.calls} calls</td>'
        f'<td class="number">{sum(one.waited.values()):.3g} s</td>'
        f'<td class="number">{100 * one.share:.1f} %</td><td></td></tr>'
        for one in costly
    ]
    return f'<h2 id="stragglers">Stragglers</h2>\n{_table("stragglers", headings, rows)}'


_NUMBERS = ("rank", "pid", "the others wait", "of their time")


def _table(label: str, headings: Iterable[str], rows: Iterable[str]) -> str:
    """Return a table that scrolls where it is too large, also by keys."""
    head = "".join(f'<th scope="col"{" class=number" if one in _NUMBERS else ""}>{one}</th>' for one in headings)
    body = "\n".join(rows)
    return (
        f'<div class="table {label}" tabindex="0" role="region" aria-labelledby="{label}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _timeline(job: Job) -> str:
    legend = "\n".join(
        f'<li><span class="swatch" data-op="{number}"></span>{escape(name)} ({count})</li>'
        for number, (name, count) in enumerate(operations(job))
    )
    keys = " &middot; ".join(f"<kbd>{key}</kbd> {what}" for key, what in _KEYS.items())
    return f"""<h2 id="timeline">Timeline</h2>
<div class="tools" role="toolbar" aria-label="View of the timeline">
<button type="button" data-do="out" aria-label="Zoom out" title="Zoom out">&minus;</button>
<button type="button" data-do="in" aria-label="Zoom in" title="Zoom in">+</button>
<button type="button" data-do="left" aria-label="Earlier" title="Earlier">&larr;</button>
<button type="button" data-do="right" aria-label="Later" title="Later">&rarr;</button>
<button type="button" data-do="all">Everything</button>
<button type="button" data-do="next">Next running or failed call</button>
</div>
<ul class="legend">
{legend}
<li><span class="swatch waited"></span>waited for the last rank</li>
<li><span class="swatch open"></span>has not ended</li>
<li><span class="swatch bad"></span>failed</li>
</ul>
<div class="timeline">
<div class="lanes" id="lanes"><canvas tabindex="0" role="application" aria-roledescription="timeline"
aria-label="The calls of all ranks, a lane for each rank and group" aria-describedby="keys"></canvas><div
id="height"></div></div>
<div class="call" id="call" role="status" hidden></div>
</div>
<p class="help" id="keys">{keys}</p>
<noscript><p class="help">The timeline needs JavaScript; all else is shown without it.</p></noscript>"""
