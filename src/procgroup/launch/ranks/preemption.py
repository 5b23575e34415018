"""The preemption notice: an agent lets its ranks know that a scheduler takes a node away, so that they save their work.

The agent makes a page of shared memory, which its ranks inherit by descriptor and map. Reading it costs a rank about a
microsecond, and a rank that has read it once gets the notice in the place of SIGTERM::

    agent                                   page                    rank
    gets SIGTERM                  | magic                  |
    give(seconds) ──────────────> | deadline (0: none)     | ──────> preempted() -> seconds left
    is_wanted <────────────────── | a rank has read it     | <──────  (sets this byte)

Both use CLOCK_MONOTONIC of their host.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable

from procgroup.process.environ import PROCGROUP_NOTICE

_MAGIC = b"PGNOTICE"
_DEADLINE = struct.Struct("=d")
_SIZE = 64
_DEADLINE_AT = 8
_WANTED_AT = 16
_LOOK_SECONDS = 0.2

# The page of this process, once mapped; None where there is none.
_page: list[mmap.mmap | None] = []
_watchers: list[threading.Thread] = []
_callbacks: list[Callable[[float], object]] = []


class Notice:
    """The agent's side. The ranks inherit ``descriptor``; PROCGROUP_NOTICE holds its number."""

    def __init__(self) -> None:
        self.descriptor: int = os.memfd_create("procgroup-notice")
        os.ftruncate(self.descriptor, _SIZE)
        self._page = mmap.mmap(self.descriptor, _SIZE)
        self._page[: len(_MAGIC)] = _MAGIC

    @property
    def is_wanted(self) -> bool:
        """Whether a rank has called ``preempted``, and so gets the notice in the place of SIGTERM."""
        return self._page[_WANTED_AT] != 0

    def give(self, seconds: float) -> None:
        """Give the ranks the notice that they have so many seconds left."""
        _DEADLINE.pack_into(self._page, _DEADLINE_AT, time.monotonic() + seconds)

    def close(self) -> None:
        self._page.close()
        os.close(self.descriptor)


def preempted() -> float | None:
    """Return how many seconds this rank has left to save its work and end; None without a notice.

    The launcher gives the notice on every node when one of the nodes gets SIGTERM, as schedulers send it before they
    take a machine away. A rank that has called this once gets no SIGTERM then: it ends by itself, and is killed when
    ``--shutdown-timeout`` has passed. Ranks see the notice at different times; let all agree (all_reduce MAX) before
    they save together. Costs about a microsecond; always None without ``procgroup run``.
    """
    page = _mapped()
    if page is None:
        return None
    page[_WANTED_AT] = 1
    deadline: float = _DEADLINE.unpack_from(page, _DEADLINE_AT)[0]
    return max(0.0, deadline - time.monotonic()) if deadline else None


def on_preemption(callback: Callable[[float], object]) -> None:
    """Call ``callback(seconds)`` in a thread of its own, once, when ``preempted()`` would return the seconds left.

    Does nothing without ``procgroup run``.
    """
    if _mapped() is None:
        return
    preempted()
    _callbacks.append(callback)
    if not any(thread.is_alive() for thread in _watchers):
        _watchers[:] = [threading.Thread(target=_watch, name="procgroup-preemption", daemon=True)]
        _watchers[0].start()


def _watch() -> None:
    from procgroup import _native  # which the launcher has no need of

    _native.add_own_thread()
    while (seconds := preempted()) is None:
        time.sleep(_LOOK_SECONDS)
    _native.add_own_tasks(1)
    try:
        while _callbacks:
            _callbacks.pop(0)(seconds)
    finally:
        _native.add_own_tasks(-1)


def _mapped() -> mmap.mmap | None:
    """Return the page, mapped once; None where the descriptor is not that of such a page."""
    if not _page:
        _page.append(_map(PROCGROUP_NOTICE.get()))
    return _page[0]


def _map(descriptor: int | None) -> mmap.mmap | None:
    if descriptor is None:
        return None
    try:
        page = mmap.mmap(descriptor, _SIZE)
    except (OSError, ValueError):
        return None
    return page if page[: len(_MAGIC)] == _MAGIC else None
