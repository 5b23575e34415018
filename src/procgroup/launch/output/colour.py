"""The colour of a rank's prefix on a terminal: always the same for the same rank."""

from __future__ import annotations

from procgroup.environ import NO_COLOR, TERM
from procgroup.launch.output.sinks import Sink

# Cyan, yellow, green, magenta, blue, and their bright forms. Programs use red for errors.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def is_coloured(sink: Sink) -> bool:
    """Return whether prefixes on a sink are coloured: on a terminal with colours, unless NO_COLOR is set."""
    return sink.is_terminal and not NO_COLOR.is_set() and TERM.get() != "dumb"


def coloured(prefix: str, rank: int) -> str:
    """Return a prefix in the colour of its rank."""
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m" if prefix else ""
