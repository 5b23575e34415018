"""What every store can do: one contract, whatever keeps the keys.

Keys are str (any text, also empty, also with NUL); values are str or bytes and come back as bytes.
Where torch's stores differ from each other, the texts and results of its TCPStore are the rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from procgroup.types import DEFAULT_STORE_TIMEOUT, Timeout

MAX_KEY_BYTES = 64 * 1024
MAX_VALUE_BYTES = 1 << 30


class Store(ABC):
    """A key-value store through which processes find each other.

    Every waiting method takes ``timeout`` (a ``timedelta`` or seconds; None: the store's own), ends
    within 0.5 s of it and of Ctrl-C, and raises StoreTimeout. A key above ``MAX_KEY_BYTES`` or a value
    above ``MAX_VALUE_BYTES`` raises StoreLimitError and stores nothing. ``timeout`` is a property,
    initially 300 s.
    """

    timeout = DEFAULT_STORE_TIMEOUT

    def set_timeout(self, timeout: Timeout) -> None: ...
    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None: ...
    @abstractmethod
    def get(self, key: str, timeout: Timeout | None = None) -> bytes: ...
    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None: ...
    @abstractmethod
    def add(self, key: str, amount: int) -> int: ...
    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool: ...
    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes: ...
    @abstractmethod
    def delete_key(self, key: str) -> bool: ...
    @abstractmethod
    def num_keys(self) -> int: ...
    @abstractmethod
    def list_keys(self, prefix: str = "") -> list[str]: ...
    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None: ...
    @abstractmethod
    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]: ...
    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None: ...
    @abstractmethod
    def queue_push(self, key: str, value: str | bytes) -> None: ...
    @abstractmethod
    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes: ...
    @abstractmethod
    def queue_len(self, key: str) -> int: ...
    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None: ...
    @abstractmethod
    def clone(self) -> Store: ...
    def has_extended_api(self) -> bool:
        return True
    def close(self) -> None:
        """Let go of connections and files. Idempotent."""
