"""The failure of one rank, and its form in JSON for the reports on other nodes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from procgroup.cluster.control_group import OutOfMemoryKills
from procgroup.launch.failures import evidence
from procgroup.launch.failures.evidence import (
    EXCEPTION_LINE,
    exception_name,
    is_consequence,
    says_connection_lost,
    says_peer_lost,
)
from procgroup.process.error_file import ErrorRecord, cut_middle, origin_as_json, read_origin
from procgroup.process.exit_reason import OWN, PEER, Origin

MAX_TEXT_BYTES = 16 * 1024
"""The largest evidence of a rank that is sent to other nodes."""

_MAX_JSON_CHARACTERS = 4 * MAX_TEXT_BYTES
_MAX_EXCEPTION_BYTES = 1024
_MAX_REASON_CHARACTERS = 400
_LONGEST_TIME = 1e12


@dataclass(frozen=True)
class RankFailure:
    """One rank that ended with an error, not because the launcher ended it.

    ``exit_code`` is negative for a signal. ``time`` is the time of the error in monotonic seconds of its node.
    ``stderr`` is the last part of the rank's stderr. ``peak_memory`` is in bytes, 0 where unknown. ``record`` is the
    content of the rank's error file. ``killed_for`` is the reason why the launcher killed it as a failed rank.
    """

    rank: int
    pid: int
    exit_code: int
    time: float
    stderr: str
    peak_memory: int = 0
    kills: OutOfMemoryKills | None = None
    host: str = ""
    node_rank: int = 0
    record: ErrorRecord | None = None
    killed_for: str = ""

    @property
    def exit_status(self) -> int:
        """The exit status as shells show it: 128 + signal for a rank that a signal ended."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    @property
    def signal_name(self) -> str | None:
        """The name of the signal that ended the rank, as torch writes it; None where no signal did."""
        if self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"<Unknown signal {-self.exit_code}>"

    @cached_property
    def evidence(self) -> str:
        """The traceback, the crash's stack, or the last lines of stderr."""
        if self.record is not None and self.record.traceback:
            return self.record.traceback
        text = evidence.RANK_PREFIX.sub("", self.stderr)
        found = ""
        if self.exit_code == 1:
            found = evidence.last_traceback(text)
        elif self.exit_code < 0:
            found = evidence.crash_stack(text)
        return found or evidence.last_lines(text)

    @property
    def exception(self) -> str:
        """The line ``Type: message`` that ends an uncaught exception's traceback; "" without one."""
        if self.record is not None:
            return self.record.message.partition("\n")[0]
        if self.exit_code != 1:
            return ""
        if chain := evidence.exceptions(self.evidence):
            return chain[-1].partition("\n")[0]
        lines = [line for line in self.evidence.splitlines() if line and not line[0].isspace()]
        named = [line for line in lines if EXCEPTION_LINE.match(line)]
        return named[-1] if named and "Error" in named[-1] else ""

    @property
    def exception_name(self) -> str:
        """The name of the uncaught exception's class, without its module; empty without one."""
        return exception_name(self.exception)

    @cached_property
    def is_secondary(self) -> bool:
        """Whether the rank failed because another rank or the store did."""
        if self.origin is not None and self.origin.kind != OWN:
            return self.origin.kind == PEER
        # An exception that is none of procgroup's may be one of Gloo or NCCL.
        if self.exception:
            return is_consequence(evidence.exceptions(self.evidence) or [self.exception])
        if self.exit_code == -signal.SIGABRT:  # how NCCL's watchdog ends a process
            return says_connection_lost(evidence.abort_reason(self.stderr))
        return self.exit_code > 0 and any(map(says_peer_lost, self.evidence.splitlines()))

    @property
    def origin(self) -> Origin | None:
        """Where the failure began, as the rank's own record has it; None where a program left none of procgroup's."""
        return self.record.origin if self.record is not None else None

    @property
    def blamed_rank(self) -> int | None:
        """The global rank that this failure names as its cause, where it is the consequence of that rank's."""
        peer = self.origin.peer if self.origin is not None and self.origin.kind == PEER else None
        return peer if peer != self.rank else None

    @property
    def reason(self) -> str:
        """The cause of the failure, in one line."""
        if self.killed_for:
            return f"killed by the launcher: {self.killed_for}"
        if self.exit_code >= 0:
            return _shortened(self.exception) or f"exit code {self.exit_code}"
        ending = f"killed by {self.signal_name}{self._memory()}"
        if self.exception:
            return f"{_shortened(self.exception)}; then {ending}"
        aborted = evidence.abort_reason(self.stderr) if self.exit_code == -signal.SIGABRT else ""
        return f"{ending}: {_shortened(aborted)}" if aborted else ending

    def to_json(self) -> str:
        """Return the failure as JSON of at most about 40 KiB; long texts are cut in the middle."""
        import json  # needed after a failure only

        kills = None if self.kills is None else [self.kills.group, self.kills.host]
        content = {
            "rank": self.rank,
            "node_rank": self.node_rank,
            "host": self.host,
            "pid": self.pid,
            "exit_code": self.exit_code,
            "time": self.time,
            "peak_memory": self.peak_memory,
            "kills": kills,
            "killed_for": evidence.printable(self.killed_for)[:_MAX_REASON_CHARACTERS],
            "exception": cut_middle(evidence.printable(self.exception), _MAX_EXCEPTION_BYTES),
            "text": cut_middle(evidence.printable(self.evidence), MAX_TEXT_BYTES),
            "procgroup": origin_as_json(self.origin),
        }
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> RankFailure:
        """Return the failure that ``to_json`` wrote. Raises ValueError for anything else."""
        import json

        if len(text) > _MAX_JSON_CHARACTERS:
            raise ValueError(f"expected a failure of at most {_MAX_JSON_CHARACTERS} characters, got {len(text)}")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"expected a failure in JSON, got {text[:80]!r}") from None
        if not isinstance(content, dict):
            raise ValueError(f"expected a failure as a JSON object, got {text[:80]!r}")
        exception, evidence_text = _text(content, "exception"), _text(content, "text")
        origin = read_origin(content.get("procgroup"))
        time = content.get("time")
        if isinstance(time, bool) or not isinstance(time, int | float) or not abs(time) < _LONGEST_TIME:
            raise ValueError(f"expected a failure whose time is a number of seconds, got {time!r:.80}")
        return cls(
            rank=_integer(content, "rank", 0),
            pid=_integer(content, "pid", 0),
            exit_code=_integer(content, "exit_code", -255, 255),
            time=float(time),
            stderr=evidence_text,
            peak_memory=_integer(content, "peak_memory", 0, 1 << 60),
            kills=_kills(content.get("kills")),
            host=_text(content, "host").replace("\n", " ")[:255],
            node_rank=_integer(content, "node_rank", 0),
            record=ErrorRecord(exception, evidence_text, origin=origin) if exception else None,
            killed_for=_text(content, "killed_for").replace("\n", " ")[:_MAX_REASON_CHARACTERS],
        )

    def _memory(self) -> str:
        """Describe the memory use of a rank that SIGKILL ended."""
        if -self.exit_code != signal.SIGKILL:
            return ""
        peak = f"; its peak memory was {_size(self.peak_memory)}" if self.peak_memory else ""
        return peak + (f"; {self.kills.verdict}" if self.kills is not None else "")


def _integer(content: dict[str, Any], name: str, least: int, most: int = (1 << 31) - 1) -> int:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"expected a failure whose {name} is from {least} to {most}, got {value!r:.80}")
    return value


def _text(content: dict[str, Any], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str):
        raise ValueError(f"expected a failure whose {name} is a text, got {value!r:.80}")
    return evidence.printable(value)


def _kills(value: object) -> OutOfMemoryKills | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"expected a failure whose kills are two counters, got {value!r:.80}")
    counters = {name: count for name, count in zip(("group", "host"), value, strict=True) if count is not None}
    return OutOfMemoryKills(**{"group": None, "host": None} | {name: _integer(counters, name, 0) for name in counters})


def _shortened(line: str) -> str:
    return line if len(line) <= _MAX_REASON_CHARACTERS else line[: _MAX_REASON_CHARACTERS - 3] + "..."


def _size(amount: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if amount >= scale:
            return f"{amount / scale:.1f} {unit}"
    return f"{amount / 1024:.0f} KiB"
