"""Memory that objects are received into: large pieces, in huge pages, used again when nothing views them any more.

To touch fresh memory costs as much as to move the bytes that go there. So a piece whose last array is gone is
kept for the next call, up to a limit, and marked so that the system may take its pages whenever it runs short.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import Any

LARGE_BYTES = 2 << 20
KEPT_BYTES = 1 << 30

# Appending and popping are atomic: a finalizer may run in any thread, even in the middle of make_room.
_kept: list[mmap.mmap] = []


def make_room(size: int) -> Any:
    """Return an array of ``size`` bytes with anything in it. Raises MemoryError."""
    import numpy as np  # groups that move no objects need none

    if size < LARGE_BYTES:
        return np.empty(size, np.uint8)
    length = -(-size // LARGE_BYTES) * LARGE_BYTES  # whole huge pages, and few lengths: more is used again
    memory = _take(length) or _map(length)
    room = np.frombuffer(memory, np.uint8, size)
    # Every view of the room keeps it alive; the memory outlives it by its place in the finalizer.
    weakref.finalize(room, _keep, memory, os.getpid()).atexit = False
    return room


def let_go() -> None:
    """Give back what is kept. What is in use is kept when its last array goes, as before."""
    _kept.clear()


def _take(size: int) -> mmap.mmap | None:
    for _ in range(len(_kept)):
        try:
            memory = _kept.pop(0)
        except IndexError:
            return None
        if len(memory) == size:
            return memory
        _kept.append(memory)
    return None


def _map(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:  # the latter where even the size is more than an address
        raise MemoryError(f"{size} bytes for objects: {error}") from error
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _keep(memory: mmap.mmap, process: int) -> None:
    if process != os.getpid():
        return
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_FREE)
        _kept.append(memory)
    while sum(map(len, _kept)) > KEPT_BYTES:
        _kept.pop(0)
