"""Serves the page of a job until the user ends it."""

from __future__ import annotations

import html
import os
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from procgroup.diagnostics.recorded_job import reading
from procgroup.diagnostics.recorded_job.text import as_text
from procgroup.diagnostics.top.watch import Watch
from procgroup.diagnostics.top.web.job_page import PAGE, JobPage
from procgroup.diagnostics.top.web.server import LOOPBACK, Server

_SECONDS_BETWEEN_CHECKS = 0.25


def serve(directory: Path, *, port: int, in_browser: bool) -> int:
    """Print the address, and serve until Ctrl-C, also when the job has ended; return 2 where the port is taken."""
    page = JobPage(Watch(directory, newest=reading.RECORDED_CALLS))
    try:
        server = Server(page.pages, PAGE.policy, port)
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
