"""Find ranks that hang: stopped, blocked in the kernel, or silent after calls of ``procgroup.report``."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from procgroup.launch.ranks.rank_process import RankProcess

LOOK_SECONDS = 5.0
"""The interval at which the ranks' states are read."""

REPORT_SECONDS = 10.0
"""After how many seconds a rank that is stopped or blocked in the kernel is reported."""

# Of /proc/PID/stat; see proc(5).
_STOPPED, _STUCK = "Tt", "D"


class HungRanks:
    """Reports the ranks of a round that hang, and kills them after ``timeout`` seconds (None: never).

    ``last_reports`` is the time of each rank's last call of ``procgroup.report``, in monotonic seconds.
    """

    def __init__(self, timeout: float | None, last_reports: Mapping[int, float], say: Callable[[str], None]) -> None:
        began = time.monotonic()
        self.next_look: float = began + LOOK_SECONDS
        self._timeout = timeout
        self._no_report_by: float | None = None if timeout is None else began + max(timeout, REPORT_SECONDS)
        self._last_reports = last_reports
        self._say = say
        self._since: dict[int, tuple[str, float]] = {}
        self._reported: set[int] = set()

    def look(self, ranks: Sequence[RankProcess]) -> None:
        """Check the running ranks, if the next check is due."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + LOOK_SECONDS
        for rank in ranks:
            self._look_at(rank, now)
        if self._no_report_by is not None and now >= self._no_report_by:
            self._no_report_by = None
            self._say_reports_are_missing()

    def _say_reports_are_missing(self) -> None:
        """Print, where no rank has reported, that a rank in an endless loop cannot be told from one that works."""
        if not self._last_reports:
            self._say(
                f"--hang-timeout {self._timeout:g}: no rank of this node has called procgroup.report yet, so only "
                "ranks that are stopped or stuck in the kernel count as hanging"
            )

    def _look_at(self, rank: RankProcess, now: float) -> None:
        state = process_state(rank.pid)
        kind = next((kind for kind in (_STOPPED, _STUCK) if state and state in kind), "")
        if kind != self._since.get(rank.pid, ("", 0.0))[0]:
            self._since[rank.pid] = (kind, now)
            self._reported.discard(rank.pid)
        seconds = now - self._since[rank.pid][1] if kind else 0.0
        if seconds >= REPORT_SECONDS and rank.pid not in self._reported:
            self._reported.add(rank.pid)
            self._say(f"rank {rank.rank} (pid {rank.pid}) {_describe(kind, rank.pid)} for {seconds:.0f} s")
        silent = now - self._last_reports.get(rank.rank, now)
        if self._timeout is not None and max(seconds, silent) >= self._timeout and not rank.killed_for:
            what = f"it {_describe(kind, rank.pid)}" if seconds >= silent else "it has not called procgroup.report"
            rank.killed_for = f"{what} for {max(seconds, silent):.0f} s (--hang-timeout {self._timeout:g})"
            self._say(f"killing rank {rank.rank} (pid {rank.pid}): {rank.killed_for}")
            rank.signal(signal.SIGKILL)


def process_state(pid: int) -> str:
    """Return the letter of the process's state, as in /proc/PID/stat; "" for one that has ended."""
    try:
        # The name is in parentheses and may contain any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _describe(kind: str, pid: int) -> str:
    if kind == _STOPPED:
        return f"has been stopped (kill -CONT {pid} lets it go on)"
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        where = ""
    return f"has been stuck in the kernel (state D{f', in {where}' if where else ''})"
