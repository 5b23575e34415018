"""The store for threads of one process: a table and a lock."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from procgroup.errors import DistStoreError, ForkedProcessError, StoreTimeout
from procgroup.stores.table import Table, TableStore

T = TypeVar("T")

# Ctrl-C does not wake a thread that waits for a lock when another thread was given the signal.
_SLICE_SECONDS = 0.25


class _Shared:
    """What a HashStore and its clones have in common."""

    def __init__(self) -> None:
        self.table = Table()
        self.changed = threading.Condition(threading.Lock())
        self.callers = itertools.count()
        self.process = os.getpid()


class HashStore(TableStore):
    """A store in the memory of this process, for ranks that are threads of it.

    Its use in a forked child, which would see a copy that nobody else sees, raises ForkedProcessError.
    """

    def __init__(self) -> None:
        self._shared = _Shared()
        self._closed = False

    def _run(self, operation: Callable[[Table], T]) -> T:
        shared = self._usable()
        with shared.changed:
            result = operation(shared.table)
            self._announce(shared)
            return result

    def _await(
        self, operation: Callable[[Table], T | None], limit: float, keys: Sequence[str], what: str = "wait"
    ) -> T:
        shared = self._usable()
        deadline = time.monotonic() + limit
        with shared.changed:
            while (result := operation(shared.table)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreTimeout(keys=keys, seconds=limit, what=what)
                shared.changed.wait(min(left, _SLICE_SECONDS))
            self._announce(shared)
            return result

    @staticmethod
    def _announce(shared: _Shared) -> None:
        if shared.table.journal:
            shared.table.journal.clear()
            shared.changed.notify_all()

    def _usable(self) -> _Shared:
        if self._shared.process != os.getpid():
            raise ForkedProcessError("a HashStore")
        if self._closed:
            raise DistStoreError("this HashStore was closed")
        return self._shared

    def _caller(self) -> str:
        return str(next(self._shared.callers))

    def clone(self) -> HashStore:
        clone = HashStore.__new__(HashStore)
        clone._shared, clone._closed, clone._seconds = self._shared, False, self._seconds
        return clone

    def close(self) -> None:
        self._closed = True
