"""What procgroup says while a program runs: records of the logger "procgroup", or else lines on standard error.

A program that has a handler of its own, on the root logger or on "procgroup", gets the records there, and standard
error gets nothing. Without one, warnings and errors are lines ``[rank3]: procgroup WARNING: text``; the prefix is that
of an uncaught exception's lines, which the launcher replaces by its own. ``PROCGROUP_LOG`` sets the level.

Python's logging is imported when there is something to say, or the program has done so: a start takes less time
without it. Native threads, which may not wait for Python, write such lines themselves (native/base/log.hpp).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from procgroup.process import environ, state

if TYPE_CHECKING:
    import logging

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40  # logging's own
_OFF = 60

LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR, "off": _OFF}

_OF_TORCH = {"OFF": None, "INFO": INFO, "DETAIL": DEBUG}


def set_rank(rank: int) -> None:
    """Set the global rank of this process, for the lines that follow; before that, it is RANK of the environment.

    Raises ValueError when PROCGROUP_LOG is none of the levels.
    """
    state.rank = rank
    share_with_native()


def share_with_native() -> None:
    """Let native threads write lines of the level that is set now. Raises ValueError as ``set_rank`` does."""
    from procgroup import _native

    rank = _own_rank()
    _native.set_log(_lowest_level(), -1 if rank is None else rank)


def is_enabled(level: int) -> bool:
    """Return whether a text of this level is wanted."""
    return level >= _lowest_level()


def debug(text: str, rank: int | None = None) -> None:
    """Say how something is done. ``rank`` is the global rank that says it, by default that of this process."""
    _log(DEBUG, text, rank)


def info(text: str, rank: int | None = None) -> None:
    """Say what has been done."""
    _log(INFO, text, rank)


def warning(text: str, rank: int | None = None) -> None:
    """Say what is not as it should be, or keeps this rank waiting."""
    _log(WARNING, text, rank)


def error(text: str, rank: int | None = None) -> None:
    """Say what has failed where no exception says it."""
    _log(ERROR, text, rank)


def _log(level: int, text: str, rank: int | None) -> None:
    if is_enabled(level):
        own = _own_rank() if rank is None else rank
        _get_logger().log(level, "%s", text, extra={"rank": own}, stacklevel=3)


def _own_rank() -> int | None:
    return environ.RANK.get() if state.rank is None else state.rank


def _environment_level() -> int | None:
    """Return the level of PROCGROUP_LOG, or else of TORCH_DISTRIBUTED_DEBUG; None without both."""
    chosen = environ.PROCGROUP_LOG.get()
    return LEVELS[chosen] if chosen else _OF_TORCH[environ.TORCH_DISTRIBUTED_DEBUG.get()]


def _lowest_level() -> int:
    if "logging" in sys.modules:
        return _get_logger().getEffectiveLevel()
    level = _environment_level()
    return WARNING if level is None else level


def _get_logger() -> logging.Logger:
    """Return the logger, with the level of the environment unless the program has set one."""
    if state.logger is None:
        from procgroup.process.log_handler import logger

        level = _environment_level()
        if level is not None and not logger.level:
            logger.setLevel(level)
        state.logger = logger
    return state.logger
