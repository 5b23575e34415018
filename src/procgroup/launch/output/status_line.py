"""The launcher's status line: "procgroup: 8 of 8 ranks up, 1 restart, step 118-120, loss 0.31"."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping

from procgroup.launch.deadlines import STATUS_DELAY_SECONDS, STATUS_INTERVAL_SECONDS
from procgroup.launch.output.progress import MAX_NAME_CHARACTERS, MAX_TEXT_CHARACTERS, MAX_VALUES, as_word
from procgroup.launch.output.sinks import Sink
from procgroup.process.exit_reason import printable


class StatusLine:
    """Draws the status line on a sink that is a terminal; the owner calls ``show_due`` at the time ``due``."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._next_time = time.monotonic() + STATUS_DELAY_SECONDS
        self._text = self._drawn = ""
        self._counts = (0, 0, 0)
        self._reports: dict[int, Mapping[str, int | float | str]] = {}

    @property
    def due(self) -> float | None:
        """The time at which the line is drawn again, in monotonic seconds; None while it has not changed."""
        return self._next_time if self._text != self._drawn else None

    def count(self, ranks_up: int, ranks: int, restarts: int) -> None:
        """Set the number of running ranks, of all ranks, and of restarts."""
        if restarts != self._counts[2]:
            self._reports.clear()
        self._counts = ranks_up, ranks, restarts
        self._text = describe(*self._counts, self._reports)

    def report(self, reports: Mapping[int, Mapping[str, int | float | str]]) -> None:
        """Add the ranks' reports, by rank."""
        self._reports.update(reports)
        self._text = describe(*self._counts, self._reports)

    def show_due(self, now: float) -> None:
        if self.due is not None and self.due <= now:
            self._drawn, self._next_time = self._text, now + STATUS_INTERVAL_SECONDS
            self._sink.show_status(self._text)

    def clear(self) -> None:
        """Remove the line, until the next count or report."""
        self._text = self._drawn = ""
        self._sink.show_status("")


def describe(ranks_up: int, ranks: int, restarts: int, reports: Mapping[int, Mapping[str, int | float | str]]) -> str:
    """Return the line: the smallest and the largest value of each reported number, the lowest rank's text."""
    parts = [f"{ranks_up} of {ranks} ranks up"]
    if restarts:
        parts.append("1 restart" if restarts == 1 else f"{restarts} restarts")
    ordered = [reports[rank] for rank in sorted(reports)]
    for name in dict.fromkeys(name for report in ordered for name in report):
        summary = _summary([report[name] for report in ordered if name in report])
        parts.append(f"{name} {summary}")
    return "procgroup: " + ", ".join(parts)


def _summary(values: list[int | float | str]) -> str:
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return str(values[0])
    least, most = as_word(min(numbers)), as_word(max(numbers))
    return least if least == most else f"{least} to {most}"


Values = dict[str, int | float | str]

_MAX_DATAGRAM_BYTES = 8192
_MAX_DATAGRAMS = 256
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class ProgressInbox:
    """Collects the ranks' reports. ``address`` is the value of PROCGROUP_REPORT_SOCKET for the ranks.

    The kernel adds the sender's user to each datagram; those of other users, and invalid ones, are dropped.
    """

    def __init__(self) -> None:
        self.address: str = f"procgroup-report-{os.urandom(12).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self.address)

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def take(self) -> dict[int, Values]:
        """Return the latest report of each rank that has reported since the last call."""
        reports: dict[int, Values] = {}
        for _ in range(_MAX_DATAGRAMS):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_MAX_DATAGRAM_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                break
            found = decode(data) if _is_of_this_user(ancillary) else None
            if found is not None:
                reports[found[0]] = found[1]
        return reports

    def close(self) -> None:
        self._socket.close()


def decode(data: bytes) -> tuple[int, Values] | None:
    """Return the rank and the values of a report; None for an invalid one."""
    try:
        content = json.loads(data)
        rank, values = content["rank"], content["values"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    if type(rank) is not int or not 0 <= rank < 1 << 31 or not isinstance(values, dict) or len(values) > MAX_VALUES:
        return None
    return rank, {printable(name)[:MAX_NAME_CHARACTERS]: _checked(value) for name, value in values.items()}


def _checked(value: object) -> int | float | str:
    if isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63):
        return value
    return printable(str(value)[:MAX_TEXT_CHARACTERS])


def _is_of_this_user(ancillary: list[tuple[int, int, bytes]]) -> bool:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            user: int = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1]
            return user == os.geteuid()
    return False
