"""torch's stores as procgroup sees them: the ranks of a torch program find each other through the store they have."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as distributed

from procgroup.errors import QueueEmptyError, StoreTimeout
from procgroup.stores.store import (
    Store,
    check_same_length,
    checked_amount,
    checked_key,
    checked_keys,
    checked_value,
    checked_world_size,
)
from procgroup.types import Timeout

# torch's own waits handle neither Ctrl-C nor the shorter deadline of another thread, so waits here poll.
_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.02


class TorchStore(Store):
    """A store of torch.distributed with the contract of procgroup's; ``underlying_store`` is torch's.

    Closing it does nothing: the program's store is the program's. What torch's store lacks raises its own error. A
    barrier only counts who comes: also a caller whose timeout passes, and whatever ``world_size`` the others gave.
    """

    def __init__(self, store: Any) -> None:
        self.underlying_store = store
        self.set_timeout(store.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(checked_key(key), checked_value(value))

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        self._await_keys([checked_key(key)], "get", timeout)
        return bytes(self.underlying_store.get(key))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._await_keys(checked_keys(keys), "wait", timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self.underlying_store.add(checked_key(key), checked_amount(amount)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self.underlying_store.check(checked_keys(keys)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(
            self.underlying_store.compare_set(checked_key(key), checked_value(expected), checked_value(desired))
        )

    def delete_key(self, key: str) -> bool:
        return bool(self.underlying_store.delete_key(checked_key(key)))

    def num_keys(self) -> int:
        return int(self.underlying_store.num_keys())

    def list_keys(self, prefix: str = "") -> list[str]:
        return [key for key in self.underlying_store.list_keys() if key.startswith(prefix)]

    def append(self, key: str, value: str | bytes) -> None:
        self.underlying_store.append(checked_key(key), checked_value(value))

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        self._await_keys(checked_keys(keys), "wait", timeout)
        return [bytes(self.underlying_store.get(key)) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        check_same_length(keys, values)
        for key, value in zip(checked_keys(keys), values, strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self.underlying_store.queue_push(checked_key(key), checked_value(value))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        if not block:
            return self._pop(checked_key(key))
        deadline = time.monotonic() + self._timeout_seconds(timeout)
        while True:  # another process may take the value that this one saw
            self._await_keys([key], "queue_pop", max(deadline - time.monotonic(), 0.0))
            try:
                return self._pop(key)
            except QueueEmptyError:
                continue

    def queue_len(self, key: str) -> int:
        return int(self.underlying_store.queue_len(checked_key(key)))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        arrived = self.add(f"{checked_key(key)}/arrived", 1)
        last_of_round = -(-arrived // checked_world_size(world_size)) * world_size
        limit = self._timeout_seconds(timeout)
        self._await(lambda: self.add(f"{key}/arrived", 0) >= last_of_round, [key], "barrier", limit)

    def clone(self) -> TorchStore:
        made = TorchStore(self.underlying_store.clone())
        made.set_timeout(self.timeout)
        return made

    def _pop(self, key: str) -> bytes:
        try:
            return bytes(self.underlying_store.queue_pop(key, False))
        except distributed.QueueEmptyError as error:
            raise QueueEmptyError(f"queue {key} is empty") from error

    def _await_keys(self, keys: list[str], what: str, timeout: Timeout | None) -> None:
        self._await(lambda: self.underlying_store.check(keys), keys, what, self._timeout_seconds(timeout))

    def _await(self, is_there: Callable[[], bool], keys: list[str], what: str, limit: float) -> None:
        deadline = time.monotonic() + limit
        pause = _FIRST_PAUSE_SECONDS
        while not is_there():
            if time.monotonic() >= deadline:
                raise StoreTimeout(keys=keys, seconds=limit, what=what)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
