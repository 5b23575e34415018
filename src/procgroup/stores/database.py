"""The base class of stores on database servers: argument checks, waits, barriers.

A subclass supplies the atomic operations (the abstract methods) and a *watch*: a subscription at the server to changes
of some keys. A wait reads, subscribes, reads again, and then sleeps until the server reports a change, so it misses no
change and does not poll. ``WATCH_SECONDS`` bounds each sleep: the read after it detects a server that no longer
answers.

A *barrier* is one cell, which the first caller of a *round* makes and the last caller removes. A caller's round is
completed when the cell is removed, or belongs to another round.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import NamedTuple, Protocol, Self, TypeVar, cast

from procgroup.errors import DistError, QueueEmptyError, StoreLimitError, StoreLost, StoreTimeout
from procgroup.stores.store import (
    Store,
    check_same_length,
    checked_amount,
    checked_key,
    checked_keys,
    checked_value,
    checked_world_size,
)
from procgroup.types import Timeout, seconds

T = TypeVar("T")

DEFAULT_TIME_TO_LIVE = timedelta(days=2)
ANSWER_SECONDS = 5.0
"""How long a server may take to answer a request that does not wait, unless answer_timeout is given."""
WATCH_SECONDS = 3.0
_LONGEST_LIFE = 9e9


class AwaitedKeys(NamedTuple):
    """The keys whose next change may end a wait; with ``barriers``, the names of barriers."""

    keys: tuple[str, ...]
    barriers: bool = False


class ChangeWatch(Protocol):
    """A subscription to changes."""

    def wait(self, timeout: float) -> None:
        """Sleep until a change since the subscription began, at most ``timeout`` seconds; may return early."""


class Barrier(NamedTuple):
    """The content of a barrier's cell."""

    round: str
    world_size: int
    callers: tuple[str, ...]

    @classmethod
    def parse(cls, cell: bytes) -> Barrier:
        fields = json.loads(cell)
        return cls(str(fields["round"]), int(fields["world_size"]), tuple(fields["callers"]))

    def cell(self) -> bytes | None:
        """Return the content of the barrier's cell; None when no caller waits."""
        return json.dumps(self._asdict()).encode() if self.callers else None

    def without(self, caller: str) -> Barrier:
        return self._replace(callers=tuple(other for other in self.callers if other != caller))


class DatabaseStore(Store):
    """A store on a database server, which outlives the processes that use it."""

    _max_value_bytes: int

    @abstractmethod
    def _write(self, pairs: Mapping[str, bytes]) -> None:
        """Store values."""

    @abstractmethod
    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the keys' values; None for a key without a value."""

    @abstractmethod
    def _exist(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether it holds a value, or a queue that is not empty."""

    @abstractmethod
    def _add(self, key: str, amount: int) -> int: ...

    @abstractmethod
    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes | None:
        """Return the value that the key then has; None where it has none."""

    @abstractmethod
    def _append(self, key: str, tail: bytes) -> None: ...

    @abstractmethod
    def _push(self, key: str, value: bytes) -> None: ...

    @abstractmethod
    def _pop(self, key: str) -> bytes | None: ...

    @abstractmethod
    def _enter_barrier(self, key: str, world_size: int, caller: str) -> str | None:
        """Add a caller to the barrier's round and return the round; None when the caller completes the round."""

    @abstractmethod
    def _leave_barrier(self, key: str, round_: str, caller: str) -> bool:
        """Remove a caller from a round; return False when the round is completed."""

    @abstractmethod
    def _read_barrier(self, key: str) -> bytes | None:
        """Return the barrier's cell."""

    @abstractmethod
    def _watch(self, awaited: AwaitedKeys) -> AbstractContextManager[ChangeWatch]:
        """Subscribe; the server has confirmed the subscription when the context is entered."""

    @abstractmethod
    def delete_all(self) -> None:
        """Remove every key of this prefix, for all processes: call it when the job has ended."""

    def set(self, key: str, value: str | bytes) -> None:
        self._write({checked_key(key): self._checked(value)})

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        return self.multi_get([key], timeout)[0]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        names = checked_keys(keys)

        def look() -> bool | AwaitedKeys:
            missing = [name for name, exists in zip(names, self._exist(names), strict=True) if not exists]
            return AwaitedKeys((missing[0],)) if missing else True

        self._await(look, self._timeout_seconds(timeout), names)

    def add(self, key: str, amount: int) -> int:
        return self._add(checked_key(key), checked_amount(amount))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._exist(checked_keys(keys)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old = checked_value(expected)
        value = self._compare_set(checked_key(key), old, self._checked(desired))
        return old if value is None else value

    def num_keys(self) -> int:
        return len(self.list_keys())

    def append(self, key: str, value: str | bytes) -> None:
        self._append(checked_key(key), self._checked(value))

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        names = checked_keys(keys)

        def look() -> list[bytes] | AwaitedKeys:
            values = self._read(names)
            if None in values:
                return AwaitedKeys((names[values.index(None)],))
            return cast(list[bytes], values)

        return self._await(look, self._timeout_seconds(timeout), names)

    def get_unless(self, keys: Sequence[str], unless: str, timeout: Timeout | None = None) -> list[bytes] | bytes:
        names, other = checked_keys(keys), checked_key(unless)

        def look() -> list[bytes] | bytes | AwaitedKeys:
            found = self._read([*names, other])
            values, ending = found[:-1], found[-1]
            if None not in values:
                return cast(list[bytes], values)
            if ending is not None:
                return ending
            return AwaitedKeys((names[values.index(None)], other))

        return cast(list[bytes] | bytes, self._await(look, self._timeout_seconds(timeout), names))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        check_same_length(keys, values)
        self._write(dict(zip(checked_keys(keys), map(self._checked, values), strict=True)))

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._push(checked_key(key), self._checked(value))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        name = checked_key(key)

        def look() -> bytes | AwaitedKeys:
            value = self._pop(name)
            return AwaitedKeys((name,)) if value is None else value

        if block:
            return self._await(look, self._timeout_seconds(timeout), (name,))
        value = self._pop(name)
        if value is None:
            raise QueueEmptyError("queue is empty")
        return value

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        name, wait_seconds, caller = checked_key(key), self._timeout_seconds(timeout), uuid.uuid4().hex
        round_ = self._enter_barrier(name, checked_world_size(world_size), caller)
        if round_ is not None:
            self._await_round(name, round_, caller, wait_seconds)

    def _await_round(self, key: str, round_: str, caller: str, timeout: float) -> None:
        def look() -> bool | AwaitedKeys:
            cell = self._read_barrier(key)
            waits = cell is not None and Barrier.parse(cell).round == round_
            return AwaitedKeys((key,), barriers=True) if waits else True

        try:
            self._await(look, timeout, (key,), "barrier")
        except StoreTimeout:
            if self._leave_barrier(key, round_, caller):
                raise
        except StoreLost:
            raise
        except BaseException:
            with suppress(DistError):
                self._leave_barrier(key, round_, caller)
            raise

    def with_timeout(self, timeout: Timeout) -> Self:
        return self._view(timeout)

    def _checked(self, value: str | bytes) -> bytes:
        data = checked_value(value)
        if len(data) > self._max_value_bytes:
            raise StoreLimitError(what="a value", size=len(data), limit=self._max_value_bytes)
        return data

    def _await(self, look: Callable[[], T | AwaitedKeys], timeout: float, keys: Sequence[str], what: str = "wait") -> T:
        """Call ``look`` after each change of the keys that it awaits, until it returns a result."""
        deadline = time.monotonic() + timeout
        found = look()
        while isinstance(found, AwaitedKeys):
            if time.monotonic() >= deadline:
                raise StoreTimeout(keys=keys, seconds=timeout, what=what)
            awaited = found
            with self._watch(awaited) as watch:
                found = look()
                if found == awaited:
                    watch.wait(min(max(deadline - time.monotonic(), 0.0), WATCH_SECONDS))
                    found = look()
        return found


def checked_prefix(prefix: str) -> str:
    """Return the prefix of a job's keys. Raises ValueError when it is empty, because jobs would share keys."""
    if not checked_key(prefix):
        raise ValueError("expected a prefix for the keys, such as the job's id, got an empty one")
    return prefix


def checked_time_to_live(time_to_live: Timeout) -> float:
    """Return how long keys outlive the last change, in seconds. Raises ValueError for a time that servers refuse."""
    life = seconds(time_to_live)
    if not 1 <= life <= _LONGEST_LIFE:
        raise ValueError(f"expected a time to live of at least 1 s and at most {_LONGEST_LIFE:g} s, got {life:g} s")
    return life


def checked_answer_timeout(answer_timeout: Timeout) -> float:
    """Return how long a server may take to answer, in seconds. Raises ValueError where that is no time."""
    answer_seconds = seconds(answer_timeout)
    if not answer_seconds > 0:
        raise ValueError(f"expected an answer_timeout of more than 0 s, got {answer_seconds:g} s")
    return answer_seconds
