"""The report that a child sends of the exception that ends it: when it was raised, its message, its traceback.

The report is text, so an exception that cannot be pickled is reported, too, and reading a report executes no code. It
goes through a pipe, of which no file is left when all processes are killed. It is short enough to be written at once,
so neither end ever waits for the other.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from procgroup.launch.failures.error_file import ErrorRecord, record_of

MAX_TEXT_BYTES = 7 * 1024
"""The largest message, and the largest traceback, that is sent: multiprocessing writes 16 KiB at once."""


class Report(NamedTuple):
    """An exception of a child; ``time`` is in seconds of ``time.monotonic``."""

    time: float
    record: ErrorRecord


def send_report(connection: Connection, error: BaseException) -> None:
    """Send the report of an exception; long texts are cut in the middle."""
    raised_at = time.monotonic()
    record = record_of(error, MAX_TEXT_BYTES)
    texts = (str(raised_at), record.message, record.traceback)
    connection.send_bytes(b"\0".join(text.replace("\0", "?").encode(errors="replace") for text in texts))


def receive_report(connection: Connection) -> Report | None:
    """Return the child's report, or None where none has arrived."""
    try:
        if not connection.poll():
            return None
        raised_at, message, traceback = connection.recv_bytes().decode().split("\0")
        return Report(float(raised_at), ErrorRecord(message, traceback))
    except (EOFError, OSError, ValueError):
        return None
