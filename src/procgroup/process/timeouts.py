"""The timeout of the calls that are issued inside of ``with procgroup.timeout(...)``.

The native engine reads the context variable itself, once it has been set for the first time: a program without such a
block pays nothing for it.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar, Token

from procgroup.types import Timeout, seconds

_context_seconds: ContextVar[float | None] = ContextVar("procgroup_timeout", default=None)


class timeout(ContextDecorator):  # noqa: N801 - used as a function
    """Limit the calls that this thread or task issues inside of ``with timeout(...)``, or of a function it decorates.

    Which timeout a call has::

        the call's own timeout= > with procgroup.timeout(...) > the group's > init_process_group's > the backend's

    ``limit`` is a timedelta or seconds, for each call by itself; calls with a ``timeout=`` of their own keep that. The
    innermost block counts. It holds for collectives, messages, object operations, the making of groups and waits on
    stores, and for ``Work.wait()`` where it ends before the deadline of the call that is waited for. Other threads and
    tasks are not concerned. Raises TypeError and ValueError for what is no length of time.
    """

    def __init__(self, limit: Timeout) -> None:
        self._seconds = seconds(limit)
        self._tokens: list[Token[float | None]] = []

    def __enter__(self) -> None:
        from procgroup import _native  # not for programs that read the current timeout only

        _native.read_context_seconds_from(_context_seconds)
        self._tokens.append(_context_seconds.set(self._seconds))

    def __exit__(self, *_: object) -> None:
        _context_seconds.reset(self._tokens.pop())


def context_timeout() -> float | None:
    """Return the seconds of the innermost ``with timeout(...)`` of this thread or task; None outside of one."""
    return _context_seconds.get()


def seconds_in_force(given: Timeout | None, default: float) -> float:
    """Return the seconds of a call: its own timeout, that of ``with timeout(...)``, or a default."""
    if given is not None:
        return seconds(given)
    context = _context_seconds.get()
    return default if context is None else context
