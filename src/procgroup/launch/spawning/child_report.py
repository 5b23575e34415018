"""The report that a child sends of the exception that ends it: when it was raised, its message, its traceback.

It is text, so an exception that cannot be pickled is reported as well as any other, and nothing is executed to read
it. It goes through a pipe, which leaves nothing behind when everything is killed, and it is so short that it is there
as a whole or not at all: neither end ever waits for the other one.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from procgroup.launch.failures.error_file import ErrorRecord
from procgroup.launch.failures.uncaught import record_of

MAX_TEXT_BYTES = 7 * 1024
"""How much of the message, and of the traceback, is sent: multiprocessing writes 16 KiB at once."""


class Report(NamedTuple):
    """An exception of a child; ``time`` is in seconds of ``time.monotonic``."""

    time: float
    record: ErrorRecord


def send_report(connection: Connection, error: BaseException) -> None:
    """Send the report of an exception; of long texts the beginning and the end."""
    raised_at = time.monotonic()
    record = record_of(error, MAX_TEXT_BYTES)
    texts = (str(raised_at), record.message, record.traceback)
    connection.send_bytes(b"\0".join(text.replace("\0", "?").encode(errors="replace") for text in texts))


def receive_report(connection: Connection) -> Report | None:
    """Return the report that has come by now, or None where the child sent none."""
    try:
        if not connection.poll():
            return None
        raised_at, message, traceback = connection.recv_bytes().decode().split("\0")
        return Report(float(raised_at), ErrorRecord(message, traceback))
    except (EOFError, OSError, ValueError):
        return None
