"""Which rank failed first, and the report that names it.

Words: a *failure* is a rank that ended with an error on its own account, not because the launcher ended it.
It is *secondary* when the rank says itself that another rank or the store was lost. The *first* failure is
the earliest that is not secondary; its traceback ends the report, where the eye falls on it.

No rank has to co-operate: the traceback is cut out of the end of what it wrote to stderr.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from procgroup.cluster.out_of_memory import OutOfMemoryKills

TAIL_LINES = 15
"""How many last lines of stderr the report repeats when there is no traceback in it."""

MAX_EVIDENCE = 16 * 1024
"""Characters of a rank's stderr that other nodes are told."""

TRACEBACK_HEADER = "Traceback (most recent call last):"
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
"""What a rank in a process group puts before each line of an uncaught exception's traceback, as torch does."""

_CRASH_HEADER = "Fatal Python error: "
# What stands between the tracebacks of chained exceptions.
_CHAINS = (
    "\nDuring handling of the above exception, another exception occurred:\n\n",
    "\nThe above exception was the direct cause of the following exception:\n\n",
)
_EXCEPTION_LINE = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?(?P<name>[A-Za-z_]\w*)(?:: .*)?$")
# Errors of which all ranks of a call have one each, in the same words but for the order of the ranks.
_SHARED = frozenset({"CollectiveMismatch", "Deadlock"})
_SECONDARY = frozenset({"PeerLost", "PeerFailed", "GroupBroken", "StoreLost"})


@dataclass(frozen=True)
class Failure:
    """One rank that ended with an error.

    ``exit_code`` is negative for a signal; ``time`` is when the error showed, in monotonic seconds;
    ``stderr`` is the end of what the rank wrote there; ``peak_memory`` is in bytes, 0 when unknown.
    """

    rank: int
    pid: int
    exit_code: int
    time: float
    stderr: str
    peak_memory: int = 0
    kills: OutOfMemoryKills | None = None

    def to_json(self) -> str:
        """Return the failure as text for the other nodes; of what the rank wrote, the evidence."""
        fields = {**asdict(self), "stderr": self.evidence[-MAX_EVIDENCE:], "kills": self.kills and asdict(self.kills)}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Failure | None:
        """Read a failure; None for what is none, as anybody who reaches the store can write there."""
        try:
            fields = json.loads(text)
            kills = fields.pop("kills")
            return cls(**fields, kills=OutOfMemoryKills(**kills) if kills else None)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    @property
    def exit_status(self) -> int:
        """The status that a shell would show: 128 + signal for a rank that a signal ended."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    @property
    def evidence(self) -> str:
        """The traceback, the crash's stack, or the last lines of stderr."""
        text = RANK_PREFIX.sub("", self.stderr)
        if self.exit_code == 1 and TRACEBACK_HEADER in text:
            return _last_traceback(text)
        if self.exit_code < 0 and _CRASH_HEADER in text:
            return text[text.rindex(_CRASH_HEADER) :]
        return "".join(text.splitlines(keepends=True)[-TAIL_LINES:])

    @property
    def exception(self) -> str:
        """The line ``Type: message`` that ends an uncaught exception's traceback; empty without one."""
        if self.exit_code != 1:
            return ""
        lines = [line for line in self.evidence.splitlines() if line and not line[0].isspace()]
        named = [line for line in lines if _EXCEPTION_LINE.match(line)]
        after_frames = _first_line_after_frames(self.evidence)
        return after_frames or (named[-1] if named and "Error" in named[-1] else "")

    @property
    def exception_name(self) -> str:
        """The name of the uncaught exception's class, without its module; empty without one."""
        match = _EXCEPTION_LINE.match(self.exception)
        return match["name"] if match else ""

    @property
    def is_secondary(self) -> bool:
        """Whether the rank failed because another rank or the store did."""
        return self.exception_name in _SECONDARY

    @property
    def reason(self) -> str:
        """What happened, in one line."""
        if self.exit_code < 0:
            return f"killed by {_signal_name(-self.exit_code)}{self._memory()}"
        return self.exception or f"exit code {self.exit_code}"

    def _memory(self) -> str:
        """Return what is known about memory, for a rank that SIGKILL ended."""
        if -self.exit_code != signal.SIGKILL:
            return ""
        peak = f"; its peak memory was {_size(self.peak_memory)}" if self.peak_memory else ""
        if self.kills is not None and (self.kills.group or self.kills.host):
            where = "control group" if self.kills.group else "host"
            number = self.kills.group or self.kills.host
            return f"{peak}; the kernel killed {number} process(es) of this {where} for want of memory"
        return f"{peak}; no out-of-memory kill was seen, so somebody sent the signal"


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that the others follow from."""
    return min(failures, key=lambda failure: (failure.is_secondary, failure.time))


def describe(failures: Sequence[Failure], ended: Sequence[int], left: Sequence[int], host: str) -> str:
    """Return the report: the other failures in one line each, then the first.

    ``ended`` are the ranks that the launcher ended; ``left`` those that ended by themselves without an error,
    which explain a first failure that only says that a peer was lost.
    """
    first = first_failure(failures)
    others = sorted((failure for failure in failures if failure is not first), key=lambda failure: failure.time)
    lines = [
        f"rank {failure.rank} (pid {failure.pid}) failed after that: {_reason_after(failure, first)}\n"
        for failure in others
    ]
    if ended:
        lines.append(f"{_ranks(ended, 'was', 'were')} ended by the launcher\n")
    if left and first.is_secondary:
        lines.append(f"{_ranks(left, 'had', 'had')} ended with exit status 0\n")
    evidence = first.evidence
    is_said_below = TRACEBACK_HEADER in evidence and first.exception_name in _SHARED  # in many words
    reason = first.exception_name if is_said_below else first.reason
    lines.append(f"rank {first.rank} ({host}, pid {first.pid}) failed first: {reason}\n")
    return "".join(lines) + (evidence if not evidence or evidence.endswith("\n") else evidence + "\n")


def _reason_after(failure: Failure, first: Failure) -> str:
    """Return why a rank failed after the first one, but not what the report says below anyway."""
    name = failure.exception_name
    return f"the same {name}" if name == first.exception_name and name in _SHARED else failure.reason


def _last_traceback(text: str) -> str:
    """Cut out the last traceback, together with those that it is chained to."""
    start = text.rindex(TRACEBACK_HEADER)
    while any(text.endswith(chain, 0, start) for chain in _CHAINS):
        earlier = text.rfind(TRACEBACK_HEADER, 0, start)
        if earlier < 0:
            break
        start = earlier
    return text[start:]


def _first_line_after_frames(text: str) -> str:
    """Return the first line behind the last traceback's frames: ``Type: message``."""
    if TRACEBACK_HEADER not in text:
        return ""
    lines = text[text.rindex(TRACEBACK_HEADER) :].splitlines()[1:]
    return next((line for line in lines if line and not line[0].isspace()), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _size(amount: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if amount >= scale:
            return f"{amount / scale:.1f} {unit}"
    return f"{amount / 1024:.0f} KiB"


def _ranks(ranks: Sequence[int], one: str, many: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    return f"ranks {', '.join(map(str, ranks))} {many}"
