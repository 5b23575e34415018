"""``procgroup.report``: a rank reports its progress to the status line of its launcher and in its flight record.

Each report is one datagram to an abstract Unix socket of the launcher. It is dropped when it cannot be sent at once,
because the next report holds newer values. The flight record keeps the last report as text, for ``procgroup top`` and
``procgroup explain``.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from procgroup.process.environ import PROCGROUP_REPORT_SOCKET, RANK

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

INTERVAL_SECONDS = 0.2
"""The least time between two reports; earlier ones are dropped."""

MAX_VALUES = 8
MAX_NAME_CHARACTERS = 32
MAX_TEXT_CHARACTERS = 64

# Types whose values can be read at no cost.
_PLAIN = frozenset({int, float, str, bool})

_next_time = 0.0
# The id of the process that opened the socket, and the socket: a forked child opens its own.
_opened: list[tuple[int, socket.socket]] = []


def report(**values: object) -> None:
    """Show this rank's progress in the launcher's status line and in its flight record: ``report(step=7, loss=0.3)``.

    The values are at most 8 numbers, arrays of one element or short texts. The call never waits for another process.
    Within 0.2 s of the last report, the status line is not updated and arrays are dropped unread. Numbers and texts
    still go to the flight record, which takes a few microseconds. It does nothing without ``procgroup run`` and
    before ``init_process_group``. Raises TypeError for a value that is not a number or text,
    and ValueError for too many, unless the report is dropped.
    """
    global _next_time
    now = time.monotonic()
    native = sys.modules.get("procgroup._native")  # without it this process has no flight record
    if now < _next_time:
        if native is not None and _PLAIN.issuperset(map(type, values.values())) and len(values) <= MAX_VALUES:
            native.report(as_text(plain(values)))
        return
    _next_time = now + INTERVAL_SECONDS
    address, rank = PROCGROUP_REPORT_SOCKET.get(), RANK.get()
    if native is None and not address:
        return
    shown = plain(values)  # once: the value of an array on a GPU has to be copied
    if native is not None:
        native.report(as_text(shown))
    if address and rank is not None:
        _send(address, encode(rank, shown))


def as_text(values: Mapping[str, int | float | str]) -> str:
    """Return a report as people read it: "step 7, loss 0.3123"."""
    text = ", ".join(f"{name} {as_word(value)}" for name, value in values.items())
    return text.encode(errors="replace").decode()  # half of a surrogate pair is not text


def as_word(value: float | str) -> str:
    """Return a text or an integer as it is, and another number with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def encode(rank: int, values: Mapping[str, object]) -> bytes:
    """Return a report as bytes. Raises TypeError and ValueError for values that cannot be sent."""
    import json

    return json.dumps({"rank": rank, "values": plain(values)}).encode()


def plain(values: Mapping[str, object]) -> dict[str, int | float | str]:
    """Return the values of a report as numbers and short texts. Raises TypeError and ValueError, as ``encode`` does."""
    if len(values) > MAX_VALUES:
        raise ValueError(f"report takes at most {MAX_VALUES} values, got {len(values)}; choose the most important ones")
    return {name[:MAX_NAME_CHARACTERS]: _plain(name, value) for name, value in values.items()}


def _plain(name: str, value: Any) -> int | float | str:
    try:
        plain = value.item() if hasattr(value, "item") else value  # the only element of an array
        if isinstance(plain, str):
            return plain[:MAX_TEXT_CHARACTERS]
        return int(plain) if isinstance(plain, int) else float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        kind = type(value).__name__
        raise TypeError(f"report takes numbers and texts, got {name} of type {kind}; give one number") from None


def _send(address: str, data: bytes) -> None:
    import socket

    try:
        if not _opened or _opened[0][0] != os.getpid():
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            atexit.register(opened.close)
            _opened[:] = [(os.getpid(), opened)]
        _opened[0][1].sendto(data, socket.MSG_DONTWAIT, "\0" + address)
    except OSError:
        return  # the socket is full, the launcher has ended, or this process has no descriptor left
