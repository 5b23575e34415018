"""The base class of the stores whose methods are requests to the native key-value table.

TCPStore sends its requests to a server, HashStore runs them on a table of this process, and FileStore on a table that
it replays from a file. What a request does, and how long it waits, is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from procgroup.stores.store import Store, check_same_length, checked_amount, checked_world_size
from procgroup.types import Timeout

if TYPE_CHECKING:
    from procgroup import _native


class RequestStore(Store):
    """A store that has each of its methods run as one request by ``_requests``, which a derived class sets."""

    _requests: _native.StoreRequests

    def set(self, key: str, value: str | bytes) -> None:
        self._requests.set(key, value, self._seconds)

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        return self._requests.get(key, self._timeout_seconds(timeout))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._requests.wait(keys, self._timeout_seconds(timeout))

    def add(self, key: str, amount: int) -> int:
        return self._requests.add(key, checked_amount(amount), self._seconds)

    def check(self, keys: Sequence[str]) -> bool:
        return self._requests.check(keys, self._seconds)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._requests.compare_set(key, expected, desired, self._seconds)

    def delete_key(self, key: str) -> bool:
        return self._requests.delete_key(key, self._seconds)

    def num_keys(self) -> int:
        return self._requests.num_keys(self._seconds)

    def list_keys(self, prefix: str = "") -> list[str]:
        return self._requests.list_keys(prefix, self._seconds)

    def append(self, key: str, value: str | bytes) -> None:
        self._requests.append(key, value, self._seconds)

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        return self._requests.multi_get(keys, self._timeout_seconds(timeout))

    def get_unless(self, keys: Sequence[str], unless: str, timeout: Timeout | None = None) -> list[bytes] | bytes:
        return self._requests.get_unless(keys, unless, self._timeout_seconds(timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        check_same_length(keys, values)
        self._requests.multi_set(keys, values, self._seconds)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._requests.queue_push(key, value, self._seconds)

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        return self._requests.queue_pop(key, block, self._timeout_seconds(timeout))

    def queue_len(self, key: str) -> int:
        return self._requests.queue_len(key, self._seconds)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        self._requests.barrier(key, checked_world_size(world_size), self._timeout_seconds(timeout))
