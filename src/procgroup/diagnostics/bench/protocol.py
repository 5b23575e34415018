"""The protocol between the driver and the ranks of a peer: lines of text over one Unix socket per rank.

::

    rank -> driver    hello RANK SIZE DESCRIPTION...
    driver -> rank    measure OPERATION BYTES SAMPLES CALLS
    rank -> driver    times IDLE_NS NS NS NS ...     IDLE_NS: processor time used since the last answer;
                                                     then one time per sample, of all its calls together
                      error TEXT...                  the rank cannot, or got a wrong result
    driver -> rank    quit                           or the end of the connection, which means the same

An idle rank blocks in ``read``, neither in its own library nor in a loop. The end of the connection therefore ends the
rank, however the driver ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Times:
    """One rank's answer: nanoseconds per sample, and its processor time between the last answer and this command."""

    idle_ns: int
    samples_ns: list[int]


def parse_times(line: str) -> Times:
    """Return what a ``times`` line says; raises ValueError with the text of an ``error`` line or of a foreign one."""
    word, _, rest = line.partition(" ")
    if word != "times":
        raise ValueError(rest if word == "error" else f"expected a times line, got {line[:80]!r}")
    idle, *samples = (int(number) for number in rest.split())
    if not samples or min(samples) < 0:
        raise ValueError(f"expected times that are not negative, got {line[:80]!r}")
    return Times(idle, samples)


class RankConnection:
    """The driver's end of one rank's socket, and a handle on the rank's process that outlives its pid."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._pending = b""
        connected.settimeout(max(deadline - time.monotonic(), 0.01))
        line = None
        while line is None:
            line = self.read_more()
        word, rank, size, *description = line.split(" ", 3)
        if word != "hello":
            raise ValueError(f"expected hello, got {line[:80]!r}")
        self.rank: int = int(rank)
        self.size: int = int(size)
        self.description: str = description[0] if description else ""
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self._process = os.pidfd_open(struct.unpack("3i", credentials)[0])

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def read_more(self) -> str | None:
        """Read once; return the line when it is complete. Raises ConnectionError at the end of the connection."""
        received = self._socket.recv(1 << 16)
        if not received:
            raise ConnectionResetError("the process ended")
        self._pending += received
        if len(self._pending) > LONGEST_LINE:
            raise ConnectionError(f"a line of more than {LONGEST_LINE} bytes")
        line, newline, rest = self._pending.partition(b"\n")
        if not newline:
            return None
        self._pending = rest
        return line.decode(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        self._socket.close()
        os.close(self._process)


def gather_lines(connections: Sequence[RankConnection], deadline: float) -> list[str]:
    """Wait for one line from every rank, in the order of ``connections``.

    Raises ConnectionError when any rank's connection ends, though others may be stuck waiting for that rank,
    and TimeoutError after the deadline (of ``time.monotonic()``); both name the ranks.
    """
    lines: dict[int, str] = {}
    waiting = {connection.fileno(): connection for connection in connections}
    poller = select.poll()
    for descriptor in waiting:
        poller.register(descriptor, select.POLLIN)
    while waiting:
        ready = poller.poll(max(deadline - time.monotonic(), 0) * 1000)
        if not ready:
            raise TimeoutError(f"no answer from rank {', '.join(str(c.rank) for c in waiting.values())} in time")
        for descriptor, _ in ready:
            connection = waiting[descriptor]
            try:
                line = connection.read_more()
            except ConnectionError as error:
                raise ConnectionError(f"rank {connection.rank}: {error}") from error
            if line is not None:
                lines[connection.rank] = line
                poller.unregister(descriptor)
                del waiting[descriptor]
    return [lines[connection.rank] for connection in connections]
