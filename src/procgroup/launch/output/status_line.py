"""The launcher's status line: "procgroup: 8 of 8 ranks up, 1 restart, step 118-120, loss 0.31"."""

from __future__ import annotations

import time
from collections.abc import Mapping

from procgroup.environ import TERM
from procgroup.launch.output.progress import as_word
from procgroup.launch.output.sinks import Sink

DELAY_SECONDS = 1.0
"""A job that ends sooner shows no status line."""

INTERVAL_SECONDS = 0.5
"""The least time between two changes of the line."""


class StatusLine:
    """Draws the status line on a sink that is a terminal; the owner calls ``show_due`` at the time ``due``."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._next_time = time.monotonic() + DELAY_SECONDS
        self._text = self._drawn = ""
        self._counts = (0, 0, 0)
        self._reports: dict[int, Mapping[str, int | float | str]] = {}

    @property
    def is_shown(self) -> bool:
        """Whether the sink is a terminal that can erase the line again."""
        return self._sink.is_terminal and TERM.get() != "dumb"

    @property
    def due(self) -> float | None:
        """The time at which the line is drawn again, in monotonic seconds; None while it has not changed."""
        return self._next_time if self.is_shown and self._text != self._drawn else None

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
            self._drawn, self._next_time = self._text, now + INTERVAL_SECONDS
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
