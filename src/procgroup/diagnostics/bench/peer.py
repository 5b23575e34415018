"""One peer: its launcher, its rank processes, and lines of text between them and the driver, over a socket per rank.

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
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from procgroup.errors import PeerFailure


@dataclass(frozen=True)
class PeerCommand:
    """How a peer is started: ``{socket}`` in an argument stands for the path of the driver's socket."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    only_float32: bool = False


@dataclass(frozen=True)
class Plan:
    """What a peer does in one round: ``samples`` times ``calls`` calls in a row."""

    samples: int
    calls: int


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


class BenchPeer:
    """A set of rank processes that stays for the whole run.

    Its launcher runs in a session of its own, so that Ctrl-C reaches the driver alone and ``close``
    decides in which order things end. All methods raise PeerFailure; the peer is then of no more use.
    """

    def __init__(self, command: PeerCommand, ranks: int, directory: Path) -> None:
        self.name: str = command.name
        self.ranks = ranks
        self.idle_ns: int = 0
        self._log = directory / f"{command.name}.log"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connections: list[RankConnection] = []
        path = directory / f"{command.name}.socket"
        self._listener.bind(str(path))
        self._listener.listen(ranks)
        arguments = [argument.replace("{socket}", str(path)) for argument in command.arguments]
        try:
            self._launcher = self._launch(arguments, command.environment)
        except OSError as error:
            self._listener.close()
            raise PeerFailure(self.name, f"cannot start {arguments[0]}: {error}") from error

    def _launch(self, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen(
                arguments,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def description(self) -> str:
        return self._connections[0].description if self._connections else ""

    def connect(self, timeout: float) -> None:
        """Wait until all ranks have said hello."""
        deadline = time.monotonic() + timeout
        while len(self._connections) < self.ranks:
            connected = self._accept_before(deadline)
            try:
                connection = RankConnection(connected, deadline)
            except (OSError, ValueError) as error:
                connected.close()
                raise self._failure(f"a rank did not say hello: {error}") from error
            self._connections.append(connection)
            if connection.size != self.ranks:
                raise self._failure(f"expected {self.ranks} ranks, rank {connection.rank} says {connection.size}")
        self._connections.sort(key=lambda connection: connection.rank)
        if [connection.rank for connection in self._connections] != list(range(self.ranks)):
            raise self._failure(f"expected ranks 0 to {self.ranks - 1}, got {[c.rank for c in self._connections]}")

    def _accept_before(self, deadline: float) -> socket.socket:
        self._listener.settimeout(0.25)
        while True:
            with contextlib.suppress(TimeoutError):
                return self._listener.accept()[0]
            if self._launcher.poll() is not None:
                raise self._failure(f"its launcher ended with exit status {self._launcher.returncode}")
            if time.monotonic() > deadline:
                raise self._failure(f"{len(self._connections)} of {self.ranks} ranks had started in time")

    def measure(self, operation: str, size: int, plan: Plan, timeout: float) -> list[float]:
        """Return the nanoseconds per call of each sample, that of the rank which took longest.

        ``size`` is in bytes per rank. A rank that dies, answers with an error or not within ``timeout`` fails the peer.
        """
        try:
            for connection in self._connections:
                connection.send(f"measure {operation} {size} {plan.samples} {plan.calls}")
            lines = gather_lines(self._connections, time.monotonic() + timeout)
            answers = [parse_times(line) for line in lines]
        except (OSError, ValueError) as error:
            raise self._failure(f"{operation} of {size} bytes: {error}") from error
        return self._slowest_rank(answers, plan)

    def _slowest_rank(self, answers: Sequence[Times], plan: Plan) -> list[float]:
        counts = {len(answer.samples_ns) for answer in answers}
        if counts != {plan.samples}:
            raise self._failure(f"expected {plan.samples} samples from each rank, got {sorted(counts)}")
        self.idle_ns += sum(answer.idle_ns for answer in answers)
        per_sample = zip(*(answer.samples_ns for answer in answers), strict=True)
        return [max(sample) / plan.calls for sample in per_sample]

    def _failure(self, reason: str) -> PeerFailure:
        tail = self._log.read_text(errors="replace").strip().splitlines()[-6:]
        return PeerFailure(self.name, "\n    ".join([reason, *tail]))

    def close(self, timeout: float = 10.0) -> None:
        """End every process of this peer: politely, and after ``timeout`` seconds by force. May be called again."""
        with contextlib.suppress(OSError):
            for connection in self._connections:
                connection.send("quit")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """End every process of this peer by force. May be called again."""
        for connection in self._connections:
            connection.kill()
            connection.close()
        self._connections.clear()
        self._listener.close()
        if self._launcher.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
