"""The table of a report on a terminal: drawn by rich where that is installed, in plain text otherwise."""

from __future__ import annotations

import sys

from procgroup.diagnostics.bench.report import Report

_WIDTH_OF_FILES = 110
_TEXT_COLUMNS = (1, 6)
"""The columns that are aligned to the left: the peer, and the verdict."""


def show(report: Report) -> None:
    """Print the table on stdout."""
    try:
        import rich.console
        import rich.table
    except ImportError:
        print(plain(report))
        return
    table = rich.table.Table(title=report.title, caption=report.caption or None)
    for column, heading in enumerate(report.headings):
        table.add_column(heading, justify="left" if column in _TEXT_COLUMNS else "right")
    for section in report.sections():
        for row in section:
            table.add_row(*row)
        table.add_section()
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    rich.console.Console(width=width, highlight=False).print(table)


def plain(report: Report) -> str:
    """Return the table as text: its title, the headings, the rows with an empty line after each size, its caption."""
    sections = [[report.headings], *report.sections()]
    widths = [max(map(len, cells)) for cells in zip(*(row for section in sections for row in section), strict=True)]
    lines = [report.title, ""]
    for section in sections:
        lines += ["  ".join(map(_aligned, enumerate(row), widths)).rstrip() for row in section] + [""]
    return "\n".join([*lines, report.caption]).rstrip()


def _aligned(cell: tuple[int, str], width: int) -> str:
    column, text = cell
    return text.ljust(width) if column in _TEXT_COLUMNS else text.rjust(width)
