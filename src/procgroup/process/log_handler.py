"""The logger "procgroup", and the handler that writes its records where the program has no handler of its own."""

from __future__ import annotations

import logging
import sys

logger: logging.Logger = logging.getLogger("procgroup")


class StandardErrorHandler(logging.Handler):
    """Write records to standard error while no other handler gets them, as logging.lastResort does."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or _has_handlers_of_the_program():
            return
        rank = getattr(record, "rank", None)
        prefix = "" if rank is None else f"[rank{rank}]: "
        try:
            sys.stderr.write(f"{prefix}procgroup {record.levelname}: {record.getMessage()}\n")
            sys.stderr.flush()
        except Exception:  # a closed file; a program's own may raise anything
            self.handleError(record)


def _has_handlers_of_the_program() -> bool:
    current: logging.Logger | None = logger
    while current is not None:
        if any(not isinstance(one, (StandardErrorHandler, logging.NullHandler)) for one in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False


logger.addHandler(StandardErrorHandler())
