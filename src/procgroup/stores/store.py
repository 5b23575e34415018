"""The interface of every key-value store, and the checks of its arguments.

Keys are str (any text, also empty, also with NUL); values are str or bytes and are returned as bytes.
Where torch's stores differ from each other, error messages and results are those of its TCPStore.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, Self

from procgroup.errors import DistStoreError, StoreLimitError, StoreTimeout
from procgroup.process.timeouts import seconds_in_force
from procgroup.types import DEFAULT_STORE_TIMEOUT, Timeout, as_timedelta, seconds

if TYPE_CHECKING:
    from procgroup import _native

MAX_KEY_BYTES = 64 * 1024
MAX_VALUE_BYTES = 1 << 30
MAX_KEYS_PER_REQUEST = 65_536

_INT_64_DIGITS = 20

_SLICE_SECONDS = 0.2
"""How long get_unless waits before it looks at the key ``unless``, on a store without such a request."""


class OnDisconnect(Protocol):
    """A key that a store will set when this process ends."""

    def withdraw(self) -> None:
        """Revert the registration: the key will not be set. Raises DistStoreError when the store does not reply."""

    def close(self) -> None:
        """Have the store set the key now, without waiting for its reply."""


class Store(ABC):
    """A key-value store through which processes find each other.

    Every waiting method takes ``timeout`` (a ``timedelta`` or seconds; None: that of ``with procgroup.timeout(...)``,
    or else the store's own), ends within 0.5 s of it and of Ctrl-C, and raises StoreTimeout. A key above
    ``MAX_KEY_BYTES`` or a value above ``MAX_VALUE_BYTES`` raises StoreLimitError and stores nothing. ``timeout`` is a
    property, initially 300 s. All methods may be called from any thread; one that waits delays no other.

    A derived class sets ``_requests``, which has a method for each request of the native table
    (native/store/requests.hpp): the arguments, then the seconds that it may last. Or it overrides the methods.
    """

    _requests: _native.StoreRequests

    _seconds = DEFAULT_STORE_TIMEOUT.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """The timeout of methods that are called without one. May be set to a ``timedelta`` or seconds."""
        return as_timedelta(self._seconds)

    @timeout.setter
    def timeout(self, timeout: Timeout) -> None:
        self.set_timeout(timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of methods that are called without one."""
        self._seconds = seconds(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the key's value, replacing an earlier one."""
        self._requests.set(key, value, self._seconds)

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return the key's value; wait until it has one."""
        return self._requests.get(key, self._timeout_seconds(timeout))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until every key has a value, or a queue that is not empty."""
        self._requests.wait(keys, self._timeout_seconds(timeout))

    def add(self, key: str, amount: int) -> int:
        """Add to the key's number, which is stored as decimal text and starts at 0, and return the sum.

        Raises DistStoreError when the key's value is not a number, or when the sum exceeds 64 bits.
        """
        return self._requests.add(key, checked_amount(amount), self._seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether every key has a value, or a queue that is not empty. Never waits."""
        return self._requests.check(keys, self._seconds)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set the key to ``desired`` if its value is ``expected``, or if it is missing and ``expected`` is empty.

        Returns the key's value after that; ``expected`` if the key is still missing.
        """
        return self._requests.compare_set(key, expected, desired, self._seconds)

    def delete_key(self, key: str) -> bool:
        """Delete a key, its value and its queue; return whether it existed."""
        return self._requests.delete_key(key, self._seconds)

    def num_keys(self) -> int:
        """Return the number of keys that have a value, or a queue that is not empty."""
        return self._requests.num_keys(self._seconds)

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, in any order."""
        return self._requests.list_keys(prefix, self._seconds)

    def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to the key's value; a missing key counts as empty."""
        self._requests.append(key, value, self._seconds)

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of several keys in one request; wait until all of them exist."""
        return self._requests.multi_get(keys, self._timeout_seconds(timeout))

    def get_unless(self, keys: Sequence[str], unless: str, timeout: Timeout | None = None) -> list[bytes] | bytes:
        """Return the values of several keys; or the value of the key ``unless``, as bytes, if that is set first.

        If all of them exist already, the result is the values of the keys. Waits as multi_get does. A store without
        such a request looks at the keys again and again.
        """
        limit = self._timeout_seconds(timeout)
        if hasattr(self, "_requests"):
            return self._requests.get_unless(keys, unless, limit)
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
        """Have the store set a key when this process ends, unless the key has a value then.

        Returns the registration, which can be withdrawn. Returns None from stores that do not detect the end of a
        process, which is all but TCPStore.
        """
        return None

    def is_hosted_here(self) -> bool:
        """Return whether the store ends, for all of its users, when this process ends."""
        return False

    def name_users(self, users: Mapping[int, str]) -> None:
        """Name the users of the store, by process id, for the message of a host process that waits for them."""
        return

    def with_timeout(self, timeout: Timeout) -> Self:
        """Return a view of this store with another timeout, on the same connections; it need not be closed.

        A store without a server returns itself, because its requests wait for no answer. So does one that a program
        writes itself, because only that program knows how to copy it.
        """
        return self

    def _view(self, timeout: Timeout) -> Self:
        view = copy(self)
        view.set_timeout(timeout)
        return view

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of several keys in one request. Raises DistStoreError when the lengths differ."""
        check_same_length(keys, values)
        self._requests.multi_set(keys, values, self._seconds)

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append a value to the key's queue."""
        self._requests.queue_push(key, value, self._seconds)

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Remove and return the first value of the key's queue; wait for one, or raise QueueEmptyError."""
        return self._requests.queue_pop(key, block, self._timeout_seconds(timeout))

    def queue_len(self, key: str) -> int:
        """Return the number of values in the key's queue."""
        return self._requests.queue_len(key, self._seconds)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` callers have called the barrier of this name; it can then be used again.

        A caller whose timeout passes no longer counts, and raises StoreTimeout. Raises DistStoreError when the callers
        that wait gave another ``world_size``.
        """
        self._requests.barrier(key, checked_world_size(world_size), self._timeout_seconds(timeout))

    @abstractmethod
    def clone(self) -> Store:
        """Return another store with the same keys and the same timeout, to be closed separately."""

    def has_extended_api(self) -> bool:
        """Return whether append, multi_get, multi_set and the queues are supported: True for every store."""
        return True

    def close(self) -> None:
        """Close connections and files. Idempotent; later calls raise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _timeout_seconds(self, timeout: Timeout | None) -> float:
        return seconds_in_force(timeout, self._seconds)


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
    """Return the amount. Raises TypeError for another type than int, ValueError for more than 64 bits."""
    if not isinstance(amount, int):
        raise TypeError(f"expected amount to be int, got {type(amount).__name__}")
    if not _fits_in_64_bits(amount):
        raise ValueError(f"expected amount to fit in 64 bits, got {amount}")
    return int(amount)


def sum_of(key: str, text: bytes, amount: int) -> int:
    """Return the number in a key's decimal text plus an amount. Raises the errors of ``Store.add``."""
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
    """Return the size of a barrier. Raises ValueError for less than 1."""
    if world_size < 1:
        raise ValueError(f"expected world_size to be at least 1, got {world_size}")
    return world_size


def check_same_length(keys: Sequence[str], values: Sequence[str | bytes]) -> None:
    """Raise DistStoreError when multi_set was given lists of different lengths."""
    if len(keys) != len(values):
        raise DistStoreError(
            f"multiSet keys and values vectors must be of same size: got {len(keys)} keys and {len(values)} values"
        )
