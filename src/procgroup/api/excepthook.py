"""Uncaught exceptions: every line is prefixed with the rank, so that mixed outputs can be told apart."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from types import TracebackType
from typing import Any

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class RankPrefix:
    """An excepthook that prints what the former hook prints, each line behind "[rank3]: "."""

    def __init__(self, rank: int, former: Hook) -> None:
        self.rank = rank
        self.former = former

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        with redirect_stderr(io.StringIO()) as text:
            self.former(kind, error, traceback)
        lines = text.getvalue().splitlines(keepends=True)
        sys.stderr.write("".join(f"[rank{self.rank}]: {line}" if line.strip() else line for line in lines))


def install(rank: int) -> None:
    """Prefix uncaught exceptions from now on."""
    remove()
    sys.excepthook = RankPrefix(rank, sys.excepthook)


def remove() -> None:
    """Put the former hook back, unless somebody has put another one since."""
    if isinstance(sys.excepthook, RankPrefix):
        sys.excepthook = sys.excepthook.former
