"""Print a line that many ranks write at about the same time once: "[ranks 0-63] (x64) epoch 3 begins".

Words: a *run* is one such line, with the ranks that have written it so far. Runs are printed in the order in which they
began: when all ranks have joined, or after COLLAPSE_SECONDS. A rank joins a run only when the run began later than the
last one that the rank has joined, so the lines of one rank keep their order::

    rank 0:  a  b  c        runs:  a {0, 1}   b {0, 1}   x {1}   c {0, 1}
    rank 1:  a  b  x  c

Live lines are never collapsed: all held lines are printed before a live one is drawn.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from typing import NamedTuple

from procgroup.launch.deadlines import COLLAPSE_SECONDS
from procgroup.launch.output.log_options import format_ranks
from procgroup.launch.output.sinks import LinePrefixer, Sink, redraws

_MAX_HELD_BYTES = 256 * 1024
# The memory of a run besides its line, so that the number of short lines is bounded, too.
_RUN_BYTES = 256


class _LineRun(NamedTuple):
    number: int
    prefix: bytes
    line: bytes
    ranks: list[int]
    due: float


class Collapser:
    """Holds the lines of several ranks back for a moment, and prints equal lines once on a sink.

    ``ranks`` is the number of ranks that may write the same line. The owner calls ``show_due`` at the time ``due``.
    """

    def __init__(self, sink: Sink, ranks: int) -> None:
        self.sink = sink
        self._ranks = ranks
        self._runs: deque[_LineRun] = deque()
        self._runs_of_line: dict[bytes, deque[_LineRun]] = {}
        self._last_joined: dict[int, int] = {}
        self._begun = 0
        self._held_bytes = 0

    @property
    def due(self) -> float | None:
        """The time at which the next held line is printed, in monotonic seconds; None while no line is held."""
        return self._runs[0].due if self._runs else None

    def put(self, rank: int, prefix: bytes, line: bytes) -> None:
        """Add one line of a rank, without its newline; ``prefix`` is used when no other rank writes the same line."""
        last = self._last_joined.get(rank, -1)
        same = self._runs_of_line.get(line, ())
        place = bisect_right(same, last, key=lambda run: run.number)
        run = same[place] if place < len(same) else self._begin(prefix, line)
        run.ranks.append(rank)
        self._last_joined[rank] = run.number
        while self._runs and (len(self._runs[0].ranks) >= self._ranks or self._held_bytes > _MAX_HELD_BYTES):
            self._show_first()

    def show_due(self, now: float) -> None:
        """Print the lines whose time has come."""
        while self._runs and self._runs[0].due <= now:
            self._show_first()

    def flush(self) -> None:
        """Print all held lines."""
        while self._runs:
            self._show_first()

    def _begin(self, prefix: bytes, line: bytes) -> _LineRun:
        run = _LineRun(self._begun, prefix, line, [], time.monotonic() + COLLAPSE_SECONDS)
        self._begun += 1
        self._held_bytes += len(line) + _RUN_BYTES
        self._runs.append(run)
        self._runs_of_line.setdefault(line, deque()).append(run)
        return run

    def _show_first(self) -> None:
        run = self._runs.popleft()
        self._held_bytes -= len(run.line) + _RUN_BYTES
        same = self._runs_of_line[run.line]
        same.popleft()
        if not same:
            del self._runs_of_line[run.line]
        several = f"[ranks {format_ranks(run.ranks)}] (x{len(run.ranks)}) ".encode()
        self.sink.put_lines(None, (run.prefix if len(run.ranks) == 1 else several) + run.line + b"\n")


class CollapsingPrefixer(LinePrefixer):
    """Splits one stream of a rank into lines for a collapser; live lines go to the sink."""

    def __init__(self, prefix: str, collapser: Collapser, rank: int, own_prefix: str = "") -> None:
        super().__init__(prefix, collapser.sink, own_prefix)
        self._collapser = collapser
        self._rank = rank

    def _show_lines(self, text: bytes) -> None:
        if self._live or redraws(text):
            self._collapser.flush()
            super()._show_lines(text)
            return
        for line in self._without_own_prefix(text)[:-1].split(b"\n"):
            self._collapser.put(self._rank, self._prefix, line)

    def _show_live(self) -> None:
        self._collapser.flush()
        super()._show_live()
