"""The messages between the command and the agents that it starts on other hosts, over stdin and stdout of ssh.

Each message is one line::

    command ──stdin───> agent    Assignment, as JSON: the data that must not be visible in a command line
    agent ────stdout──> command  READY and a Ready, as JSON: the flags are valid, the program exists
    command ──stdin───> agent    the endpoint, host:port, at which the agents meet; the agent begins
    command ──stdin───> agent    the name of a signal, for each signal that the command gets

After READY, stdout and stderr carry the output of the ranks and the agent. The end of stdin means that the command or
the connection has ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

READY = b"procgroup-agent: "
"""The beginning of the line that an agent writes to stdout when it is ready."""

MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True)
class Assignment:
    """One agent's part of the job.

    ``host`` is the name in the user's list. ``environment`` is added to the host's own; it holds the job's key.
    ``port`` is the port at which this agent hosts the agents' store, 0 for any free one; None where another agent hosts
    the store.
    """

    node_rank: int
    host: str
    directory: str
    environment: Mapping[str, str]
    port: int | None = None

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Assignment:
        """Read an assignment. Raises ValueError for another line."""
        try:
            return cls(**_known_fields(cls, line))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"expected an assignment as one line of JSON, got {len(line)} bytes: {error}") from error


@dataclass(frozen=True)
class Ready:
    """An agent's answer: its version of procgroup, and the port that it has reserved for the agents' store, if any."""

    version: str
    port: int | None = None

    def to_line(self) -> bytes:
        return READY + json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Ready:
        """Read an answer. Raises ValueError for another line."""
        try:
            return cls(**_known_fields(cls, line.removeprefix(READY)))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"expected an agent's answer, got {line[:200]!r}") from error


def _known_fields(kind: type[Assignment] | type[Ready], line: bytes) -> dict[str, Any]:
    """Read the fields of a message; unknown ones, of another version of procgroup, are left out."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in json.loads(line).items() if name in names}


class LineReader:
    """Reads lines from a descriptor. Unlike a file object, it has no lock that could block the interpreter's exit."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending = b""

    def read(self) -> bytes | None:
        """Wait for the next line and return it without its newline; None at the end."""
        while b"\n" not in self._pending:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:
                return None
            if not data or len(self._pending) > MAX_LINE_BYTES:
                return None
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line
