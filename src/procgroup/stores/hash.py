"""The store for threads of one process."""

from __future__ import annotations

from copy import copy

from procgroup import _native
from procgroup.stores.store import Store


class HashStore(Store):
    """A store in the memory of this process, for ranks that are threads of it.

    Its use in a forked child, which would see a copy that no other process sees, raises ForkedProcessError.
    """

    _requests: _native.InProcessStore

    def __init__(self) -> None:
        self._requests = _native.InProcessStore()

    def clone(self) -> HashStore:
        clone = copy(self)
        clone._requests = self._requests.clone()
        return clone

    def close(self) -> None:
        self._requests.close()
