"""``procgroup top --web``: the page of a running job, and the state that its script reads again and again."""

from __future__ import annotations

import html
import math
import os
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from procgroup.diagnostics.page.document import TIMELINE_SCRIPTS, Page, as_json, table, timeline, timeline_data
from procgroup.diagnostics.recorded_job import reading, text
from procgroup.diagnostics.recorded_job.text import as_text
from procgroup.diagnostics.top.server import LOOPBACK, HttpAnswer, Pages, PageServer
from procgroup.diagnostics.top.watch import HEADINGS, TO_THE_RIGHT, JobWatch, Look, Row, cells, header

_SCRIPTS = [Path(__file__).with_name(name) for name in ("follow.js", "live.js")]
PAGE = Page((*TIMELINE_SCRIPTS, *_SCRIPTS), also_allowed="connect-src 'self'")

_SECONDS_BETWEEN_LOOKS = 0.5
# As on a terminal: of many ranks a look takes longer, and comes less often.
_PAUSES_PER_LOOK = 20
# The clock of a rank's record may run so much behind that of this process.
_OVERLAP_SECONDS = 0.05

_SECONDS_BETWEEN_CHECKS = 0.25


_MOST_STRAGGLERS = 3

_BODY = f"""<header>
<h1><span id="name"></span> <span class="badge" id="badge" role="status"></span></h1>
<p><code id="program"></code></p>
<p id="summary"></p>
<ul class="findings" id="findings" aria-label="What is wrong" aria-live="polite"></ul>
</header>
<main>
<h2 id="ranks">Ranks</h2>
{table("live", HEADINGS, (), numbers=[HEADINGS[column] for column in TO_THE_RIGHT])}
{timeline(is_live=True)}
</main>
<footer>Read from the flight records of the ranks by procgroup top, while this page is visible.</footer>"""


class Taken(NamedTuple):
    """A look, and when it was taken."""

    moment: float
    look: Look


class JobPage:
    """Answers browsers with looks at a job. A look is taken when one asks, and the last one when the job has ended."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._due = -math.inf
        self._taken = self._look()

    @property
    def pages(self) -> Pages:
        """The paths that are served."""
        return {"/": self._page, "/state": self._state}

    def look(self) -> Look:
        """Return the newest look; take it unless the last one is recent, or the job had ended."""
        return self._newest().look

    def _newest(self) -> Taken:
        with self._lock:
            if time.monotonic() >= self._due and not self._taken.look.has_ended:
                self._taken = self._look()
            return self._taken

    def _look(self) -> Taken:
        moment, began = time.time(), time.thread_time()
        look = self._watch.look()
        pause = max(_SECONDS_BETWEEN_LOOKS, _PAUSES_PER_LOOK * (time.thread_time() - began))
        self._due = time.monotonic() + pause
        return Taken(moment, look)

    def _page(self, _: Mapping[str, str]) -> HttpAnswer:
        look = self._newest()
        return HttpAnswer("text/html", PAGE.html(f"{look.look.job.name}: procgroup top", _BODY, state(*look)))

    def _state(self, parameters: Mapping[str, str]) -> HttpAnswer:
        return HttpAnswer(
            "application/json", as_json(state(*self._newest(), since=_number(parameters.get("since", ""))))
        )


def state(moment: float, look: Look, *, since: float = -math.inf) -> dict[str, Any]:
    """Return a look, with the calls that have not ended or ended later than ``since``: microseconds, as in the data."""
    job = look.job
    origin = min(rank.began for rank in job.ranks)
    _, summary = header(look)
    return {
        "name": job.name,
        "program": job.ranks[0].program,
        "summary": summary,
        "ended": look.has_ended,
        "findings": _findings(look),
        "rows": [_row(row) for row in look.rows],
        "calls": timeline_data(job, origin, moment=moment, since=origin + since / 1e6 - _OVERLAP_SECONDS),
    }


def _findings(look: Look) -> list[tuple[str, str]]:
    """Return sentences with their kinds: what is wrong, and which ranks are slow, or that there is neither."""
    wrong = [("wrong", finding.sentence) for finding in look.found]
    slow = [("slow", str(one)) for one in look.stragglers[:_MOST_STRAGGLERS]]
    well = [] if wrong or (slow and not look.has_ended) else [("well", one) for one in text.sentences(look.job, [])]
    return [*wrong, *well, *slow]


def _row(row: Row) -> dict[str, Any]:
    return {
        "cells": cells(row),
        "state": row.state,
        "slowest": row.is_slowest,
        "cause": row.is_cause,
        "waits": round(row.waiting_share, 3),
    }


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return -math.inf


def serve(directory: Path, *, port: int, in_browser: bool) -> int:
    """Print the address, and serve until Ctrl-C, also when the job has ended; return 2 where the port is taken."""
    page = JobPage(JobWatch(directory, newest=reading.RECORDED_CALLS))
    try:
        server = PageServer(page.pages, PAGE.policy, port)
    except OSError as error:
        print(
            f"procgroup top: cannot listen on {LOOPBACK}:{port}: {error.strerror}; --port chooses another one",
            file=sys.stderr,
        )
        return 2
    with server, _browser(server.address if in_browser else ""):
        print(f"{server.address}\nCtrl-C ends it", flush=True)
        while reading.is_running(directory) or not page.look().has_ended:
            time.sleep(_SECONDS_BETWEEN_CHECKS)
        last = page.look()
        print(f"the job has ended; the page stays until Ctrl-C\n{as_text(last.job, last.found)}", flush=True)
        while True:
            time.sleep(_SECONDS_BETWEEN_CHECKS)


@contextmanager
def _browser(address: str) -> Iterator[None]:
    """Open an address in a browser, if one is given.

    By way of a file that this user alone can read: all users of a host can read the command line of a browser.
    """
    if not address:
        yield
        return
    descriptor, path = tempfile.mkstemp(prefix="procgroup-top-", suffix=".html")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={html.escape(address)}">')
        threading.Thread(target=webbrowser.open, args=(Path(path).as_uri(),), daemon=True).start()
        yield
    finally:
        Path(path).unlink(missing_ok=True)
