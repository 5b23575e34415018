"""A rank of a client's program that fails on purpose, and what the others see of it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from client_report import report


def fail(rank: int, how: str = "") -> None:
    """Raise on rank 1, or kill its process, as ``how`` or the command line says; do nothing on other ranks."""
    if rank != 1:
        return
    report(rank, "time of the failure", time.time())
    if (how or sys.argv[1]) == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("on purpose")


@contextlib.contextmanager
def reporting_errors(rank: int) -> Iterator[None]:
    """Report the RuntimeError that ends the block, and when it was raised, and raise it again.

    Launchers send SIGTERM to the other ranks as soon as one has failed; it is ignored, so that they come to report.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    except RuntimeError as error:
        report(rank, "error", str(error))
        report(rank, "time of the error", time.time())
        raise
