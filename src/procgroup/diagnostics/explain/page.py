"""One page that shows all that is known of a job, and needs nothing else: it works offline, and from a mail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from procgroup.diagnostics.page.document import TIMELINE_SCRIPTS, Page, first_issued, table, timeline, timeline_data
from procgroup.diagnostics.recorded_job import stragglers, text
from procgroup.diagnostics.recorded_job.findings import JobFinding, duration
from procgroup.diagnostics.recorded_job.job import Job, Rank

_START = Path(__file__).with_name("start.js")
_NUMBERS = ("rank", "pid", "the others wait", "of their time")


def page(job: Job, found: Sequence[JobFinding]) -> str:
    """Return the page as HTML."""
    body = f"""{_header(job, found)}
<main>
{_ranks(job)}
{_stragglers(job)}
{timeline()}
</main>
<footer>Written by procgroup explain. Times are those of the clocks of the ranks' hosts.</footer>"""
    data = timeline_data(job, first_issued(job), moment=job.now)
    return Page((*TIMELINE_SCRIPTS, _START)).html(f"{_title(job)}: procgroup explain", body, data)


def _title(job: Job) -> str:
    """Return the name of the job's program, as in "train.py": people know the job by it."""
    program = job.ranks[0].program.split(" ")[0]
    return Path(program).name or job.name


def _header(job: Job, found: Sequence[JobFinding]) -> str:
    hosts = ", ".join(dict.fromkeys(rank.host for rank in job.ranks))
    ranks = "1 rank" if job.world_size == 1 else f"{job.world_size} ranks"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.began))
    ran = "running for" if job.is_alive else "ran for"
    sentences = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in text.sentences(job, found))
    return f"""<header>
<h1>{escape(_title(job))}</h1>
<p>Job <code>{escape(job.name)}</code>: <code>{escape(job.ranks[0].program)}</code></p>
<p>{ranks} on {escape(hosts)}; began {started}, {ran} {duration(job.now - job.began)}</p>
<ul class="findings{" wrong" if found else ""}" aria-label="What is wrong">
{sentences}
</ul>
</header>"""


def _ranks(job: Job) -> str:
    headings, *rows = text.table(job)
    cells = [_row_of_rank(rank, row) for rank, row in zip(job.ranks, rows, strict=True)]
    return f'<h2 id="ranks">Ranks</h2>\n{table("ranks", headings, cells, numbers=_NUMBERS)}'


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
    costly = stragglers.costly(stragglers.find(job))
    if not costly:
        return ""
    headings = ("rank", "operation", "last in", "the others wait", "of their time", "")
    rows = [
        f'<tr><td class="number">{one.rank}</td><td>{escape(one.op)}</td><td>{one.last} of {one.calls} calls</td>'
        f'<td class="number">{stragglers.waiting_time(sum(one.waited.values()))}</td>'
        f'<td class="number">{100 * one.share:.1f} %</td><td></td></tr>'
        for one in costly
    ]
    return f'<h2 id="stragglers">Stragglers</h2>\n{table("stragglers", headings, rows, numbers=_NUMBERS)}'
