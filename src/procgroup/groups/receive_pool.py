"""A pool of memory for received objects: whole huge pages, reused when no array views them any more.

To touch fresh memory costs as much as to copy the bytes into it. So an allocation whose last array is gone stays in
the pool for the next call, up to a limit, and is marked so that the system may take its pages when it runs short.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import Any

POOLED_BYTES = 2 << 20
"""Allocations from this size on come from the pool; their lengths are multiples of it."""

POOL_BYTES = 1 << 30

# Appending and popping are atomic: a finalizer may run in any thread, even in the middle of allocate().
_free: list[mmap.mmap] = []


def allocate(size: int) -> Any:
    """Return an uninitialised array of ``size`` bytes. Raises MemoryError."""
    import numpy as np  # groups that move no objects need none

    if size < POOLED_BYTES:
        return np.empty(size, np.uint8)
    length = -(-size // POOLED_BYTES) * POOLED_BYTES  # whole huge pages, and few lengths: more is reused
    memory = _take(length) or _map(length)
    array = np.frombuffer(memory, np.uint8, size)
    # Every view of the array keeps it alive; the finalizer keeps the memory, and returns it to the pool.
    weakref.finalize(array, _give_back, memory, os.getpid()).atexit = False
    return array


def clear() -> None:
    """Free the pool's memory. Memory in use returns to the pool when its last array is gone, as before."""
    _free.clear()


def _take(size: int) -> mmap.mmap | None:
    for _ in range(len(_free)):
        try:
            memory = _free.pop(0)
        except IndexError:
            return None
        if len(memory) == size:
            return memory
        _free.append(memory)
    return None


def _map(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:  # the latter when the size exceeds the address space
        raise MemoryError(f"{size} bytes for objects: {error}") from error
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give_back(memory: mmap.mmap, process: int) -> None:
    if process != os.getpid():
        return
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_FREE)
        _free.append(memory)
    while sum(map(len, _free)) > POOL_BYTES:
        _free.pop(0)
