"""One peer: its launcher, its rank processes, and their sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from procgroup.diagnostics.bench.protocol import RankConnection, Times, gather_lines, parse_times
from procgroup.diagnostics.bench.schedule import Plan
from procgroup.errors import PeerFailure


@dataclass(frozen=True)
class PeerCommand:
    """How a peer is started: ``{socket}`` in an argument stands for the path of the driver's socket."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    only_float32: bool = False


class Peer:
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
