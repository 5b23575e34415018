"""What every store can do: one contract, whatever keeps the keys.

Keys are str (any text, also empty, also with NUL); values are str or bytes and come back as bytes.
Where torch's stores differ from each other, the texts and results of its TCPStore are the rule.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from procgroup.errors import DistStoreError, StoreLimitError, StoreTimeout
from procgroup.types import DEFAULT_STORE_TIMEOUT, Timeout, seconds

MAX_KEY_BYTES = 64 * 1024
MAX_VALUE_BYTES = 1 << 30
MAX_KEYS_PER_REQUEST = 65_536

_SLICE_SECONDS = 0.2
_INT_64_DIGITS = 20


class OnDisconnect(Protocol):
    """A key that a store sets when this process ends."""

    def withdraw(self) -> None:
        """Let the store not set the key. Raises DistStoreError when it does not answer."""

    def close(self) -> None:
        """Let the store set the key now, without waiting for its answer."""


class Store(ABC):
    """A key-value store through which processes find each other.

    Every waiting method takes ``timeout`` (a ``timedelta`` or seconds; None: the store's own), ends
    within 0.5 s of it and of Ctrl-C, and raises StoreTimeout. A key above ``MAX_KEY_BYTES`` or a value
    above ``MAX_VALUE_BYTES`` raises StoreLimitError and stores nothing. ``timeout`` is a property,
    initially 300 s. All methods may be called from any thread; one that waits delays no other.
    """

    _seconds = DEFAULT_STORE_TIMEOUT.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long waiting methods wait when they are not told. May be set to a ``timedelta`` or seconds."""
        return timedelta(seconds=min(self._seconds, timedelta.max.total_seconds() - 1))

    @timeout.setter
    def timeout(self, timeout: Timeout) -> None:
        self.set_timeout(timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long waiting methods wait when they are not told."""
        self._seconds = seconds(timeout)

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store a value, in the place of what the key held before."""

    @abstractmethod
    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return the key's value; wait until there is one."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until every key holds a value, or a queue that is not empty."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is kept as decimal text and starts at 0, and return the sum.

        Raises DistStoreError when the key holds something else, or when the sum exceeds 64 bits.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether every key holds a value, or a queue that is not empty. Never waits."""

    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store ``desired`` if the key holds ``expected``, or is missing and ``expected`` is empty.

        Returns the value that the key then holds; ``expected`` when it is missing and stays so.
        """

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Forget a key, its value and its queue; tell whether there was one."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return how many keys hold a value, or a queue that is not empty."""

    @abstractmethod
    def list_keys(self, prefix: str = "") -> list[str]:
        """Return those keys, in any order, that begin with ``prefix``."""

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None:
        """Put bytes behind the key's value; a missing key counts as empty."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of several keys in one request; wait until all are there."""

    def get_unless(self, keys: Sequence[str], unless: str, timeout: Timeout | None = None) -> list[bytes] | bytes:
        """Return the values of several keys; or the value of the key ``unless``, as bytes, if that comes first.

        Where there are both already, the values of the keys count. Waits as multi_get does.
        """
        limit = self._timeout_seconds(timeout)
        deadline = time.monotonic() + limit
        while True:
            left = deadline - time.monotonic()
            try:
                return self.multi_get(keys, max(min(left, _SLICE_SECONDS), 0.0))
            except StoreTimeout:
                if self.check([unless]):
                    return self.get(unless)
                if time.monotonic() >= deadline:
                    raise StoreTimeout(keys=keys, seconds=limit) from None

    def set_on_disconnect(self, key: str, value: str | bytes) -> OnDisconnect | None:
        """Let the store set a key, unless it has a value, when this process ends; return what can withdraw that.

        None where the store does not notice that a process ends: only a TCPStore does.
        """
        return None

    def is_hosted_here(self) -> bool:
        """Tell whether this store ends with this process, for all who use it."""
        return False

    def name_users(self, users: Mapping[int, str]) -> None:
        """Say who uses the store, by process id, for the message of a host that waits for them at its end."""
        return

    def with_timeout(self, timeout: Timeout) -> Store:
        """Return a view of this store with another timeout, on the same connections; it needs no closing."""
        return self

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values in one request. Raises DistStoreError when the lengths differ."""

    @abstractmethod
    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of the key's queue."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Take the first value of the key's queue; wait for one, or raise QueueEmptyError."""

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """Return how many values the key's queue holds."""

    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` callers are in the barrier of this name; it can then be used again.

        A caller whose timeout passes leaves the barrier and raises StoreTimeout. Raises DistStoreError
        when those who wait in it gave another ``world_size``.
        """

    @abstractmethod
    def clone(self) -> Store:
        """Return another store on the same keys, with the same timeout, to be closed on its own."""

    def has_extended_api(self) -> bool:
        """Tell whether append, multi_get, multi_set and the queues work: on every store."""
        return True

    def close(self) -> None:
        """Let go of connections and files. Idempotent; later calls raise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _timeout_seconds(self, timeout: Timeout | None) -> float:
        return self._seconds if timeout is None else seconds(timeout)


def checked_key(key: str) -> str:
    """Return the key. Raises TypeError for another type, StoreLimitError for one that is too long."""
    if not isinstance(key, str):
        raise TypeError(f"expected key to be str, got {type(key).__name__}")
    size = len(key.encode())
    if size > MAX_KEY_BYTES:
        raise StoreLimitError(what="a key", size=size, limit=MAX_KEY_BYTES)
    return key


def checked_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys as a list. Raises TypeError, also for one str, and StoreLimitError."""
    if isinstance(keys, (str, bytes)):
        raise TypeError("expected keys to be a sequence of str, got one str")
    if len(keys) > MAX_KEYS_PER_REQUEST:
        raise StoreLimitError(what="a list of keys", size=len(keys), limit=MAX_KEYS_PER_REQUEST)
    return [checked_key(key) for key in keys]


def checked_value(value: str | bytes) -> bytes:
    """Return the value as bytes. Raises TypeError for another type, StoreLimitError for one that is too long."""
    if isinstance(value, str):
        value = value.encode()
    elif not isinstance(value, bytes):
        raise TypeError(f"expected value to be str or bytes, got {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise StoreLimitError(what="a value", size=len(value), limit=MAX_VALUE_BYTES)
    return value


def checked_amount(amount: int) -> int:
    """Return what is to be added. Raises TypeError and ValueError for what is no 64-bit integer."""
    if not isinstance(amount, int):
        raise TypeError(f"expected amount to be int, got {type(amount).__name__}")
    if not _fits_in_64_bits(amount):
        raise ValueError(f"expected amount to fit in 64 bits, got {amount}")
    return int(amount)


def sum_of(key: str, text: bytes, amount: int) -> int:
    """Return the number that a key holds as decimal text, plus an amount. Raises what ``Store.add`` raises."""
    digits = text.removeprefix(b"-")
    significant = digits.lstrip(b"0")
    if not (digits.isdigit() and digits.isascii() and len(significant) < _INT_64_DIGITS):
        raise not_a_number(key)
    number = int(significant or b"0") * (-1 if text[:1] == b"-" else 1)
    if not _fits_in_64_bits(number):
        raise not_a_number(key)
    if not _fits_in_64_bits(number + amount):
        raise sum_too_large(key)
    return number + amount


def _fits_in_64_bits(number: int) -> bool:
    return -(2**63) <= number < 2**63


def not_a_number(key: str) -> DistStoreError:
    return DistStoreError(f"add: key '{key}' holds a value that is not a decimal number of 64 bits")


def sum_too_large(key: str) -> DistStoreError:
    return DistStoreError(f"add: the sum at key '{key}' does not fit in 64 bits")


def other_world_size(key: str, theirs: int, ours: int) -> DistStoreError:
    return DistStoreError(f"barrier '{key}': others wait in it with world size {theirs}, this call said {ours}")


def checked_world_size(world_size: int) -> int:
    """Return the size of a barrier. Raises ValueError when nobody could pass it."""
    if world_size < 1:
        raise ValueError(f"expected world_size to be at least 1, got {world_size}")
    return world_size


def check_same_length(keys: Sequence[str], values: Sequence[str | bytes]) -> None:
    """Raise DistStoreError when multi_set was given lists of different lengths."""
    if len(keys) != len(values):
        raise DistStoreError(
            f"multiSet keys and values vectors must be of same size: got {len(keys)} keys and {len(values)} values"
        )
