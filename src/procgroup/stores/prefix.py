"""A view of a store in which every key has a prefix, so that several users of the store do not share keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from procgroup.stores.store import OnDisconnect, Store, checked_key
from procgroup.types import Timeout


class PrefixStore(Store):
    """A view of another store whose ``key`` is ``prefix + "/" + key`` in that store.

    ``list_keys`` and ``num_keys`` return the keys of this prefix only. Its timeout is its own, initially
    the other store's. ``close`` leaves the other store open.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"expected store to be a procgroup Store, got {type(store).__name__}")
        self._prefix = checked_key(prefix) + "/"
        self._store = store
        self._seconds = store._seconds

    @property
    def underlying_store(self) -> Store:
        """The store that contains the keys."""
        return self._store

    @property
    def prefix(self) -> str:
        """The prefix of each key, without the slash."""
        return self._prefix[:-1]

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def _names(self, keys: Sequence[str]) -> list[str]:
        if isinstance(keys, (str, bytes)):
            raise TypeError("expected keys to be a sequence of str, got one str")
        return [self._name(key) for key in keys]

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._name(key), value)

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        return self._store.get(self._name(key), self._timeout_seconds(timeout))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._store.wait(self._names(keys), self._timeout_seconds(timeout))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._name(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._names(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._store.compare_set(self._name(key), expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._name(key))

    def num_keys(self) -> int:
        return len(self._store.list_keys(self._prefix))

    def list_keys(self, prefix: str = "") -> list[str]:
        return [key[len(self._prefix) :] for key in self._store.list_keys(self._name(prefix))]

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(self._name(key), value)

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        return self._store.multi_get(self._names(keys), self._timeout_seconds(timeout))

    def get_unless(self, keys: Sequence[str], unless: str, timeout: Timeout | None = None) -> list[bytes] | bytes:
        return self._store.get_unless(self._names(keys), self._name(unless), self._timeout_seconds(timeout))

    def set_on_disconnect(self, key: str, value: str | bytes) -> OnDisconnect | None:
        return self._store.set_on_disconnect(self._name(key), value)

    def is_hosted_here(self) -> bool:
        return self._store.is_hosted_here()

    def name_users(self, users: Mapping[int, str]) -> None:
        self._store.name_users(users)

    def with_timeout(self, timeout: Timeout) -> PrefixStore:
        return PrefixStore(self.prefix, self._store.with_timeout(timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set(self._names(keys), values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._store.queue_push(self._name(key), value)

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        return self._store.queue_pop(self._name(key), block, self._timeout_seconds(timeout))

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._name(key))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        self._store.barrier(self._name(key), world_size, self._timeout_seconds(timeout))

    def clone(self) -> PrefixStore:
        clone = PrefixStore(self.prefix, self._store.clone())
        clone._seconds = self._seconds
        return clone
