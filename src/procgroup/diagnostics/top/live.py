"""The view on a terminal, drawn by rich on the terminal's second screen, so that nothing of it stays there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rich.box
import rich.console
import rich.live
import rich.table
from rich.text import Text

from procgroup.diagnostics.top import watch
from procgroup.diagnostics.top.watch import Look, Row

_MOST_SENTENCES = 3
_FOOTER = "q: quit   waits: share of a rank's time spent waiting for other ranks"
# The two lines of the header, an empty line, the headings with the line under them, the footer with the one above it.
_OTHER_LINES = 7


@contextmanager
def view() -> Iterator[View]:
    """Open the second screen; close it at the end."""
    console = rich.console.Console(highlight=False)
    with rich.live.Live(console=console, screen=True, auto_refresh=False) as live:
        yield View(console, live)


class View:
    """Draws looks, each in place of the last."""

    def __init__(self, console: Any, live: Any) -> None:  # rich may be absent where types are checked
        self._console, self._live = console, live

    def show(self, look: Look) -> None:
        """Draw a look in as many lines as the terminal has."""
        wrong = _shortened([finding.sentence for finding in look.found])
        width = max(self._console.width, 1)
        room = self._console.height - _OTHER_LINES - sum(math.ceil(len(line) / width) for line in wrong)
        title, ranks = watch.header(look)
        lines = [
            Text(title, style="bold", no_wrap=True, overflow="ellipsis"),
            Text(ranks, no_wrap=True, overflow="ellipsis"),
            *(Text(line, style="bold red") for line in wrong),
        ]
        rows = fitting(look.rows, max(room, 1))
        left_out = len(look.rows) - len(rows)
        footer = _FOOTER + (f"   {left_out} more ranks: a higher terminal shows them" if left_out else "")
        self._live.update(
            rich.console.Group(*lines, Text(), _drawn(rows, width), Text(footer, style="dim", no_wrap=True)),
            refresh=True,
        )


def fitting(rows: list[Row], room: int) -> list[Row]:
    """Return as many rows as there is room for: those that are the cause of something before the others."""
    first = sorted(rows, key=lambda row: (not row.is_cause, not row.is_slowest, row.rank))[:room]
    return sorted(first, key=lambda row: row.rank)


def _shortened(wrong: list[str]) -> list[str]:
    more = len(wrong) - _MOST_SENTENCES
    return wrong if more <= 0 else [*wrong[:_MOST_SENTENCES], f"and {more} more: procgroup explain"]


def _drawn(rows: list[Row], width: int) -> rich.table.Table:
    drawn = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, expand=True, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column, heading in enumerate(watch.HEADINGS):
        drawn.add_column(
            heading,
            justify="right" if column in watch.TO_THE_RIGHT else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=max(width // 3, 20) if heading == "call" else None,
            ratio=1 if heading == "reported" else None,
        )
    for row in rows:
        # As Text: what a program reports is not markup.
        drawn.add_row(*map(Text, watch.cells(row)), style=_style(row))
    return drawn


def _style(row: Row) -> str:
    if row.is_cause or row.state in ("failed", "lost"):
        return "bold red"
    if row.is_slowest:
        return "yellow"
    return "" if row.waited is not None or row.state == "running" else "dim"
