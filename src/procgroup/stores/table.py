"""Keys, queues and barriers as plain Python data, for the stores that need no server.

A *record* is one change: ``(kind, key, data)``. Every change of a table goes through ``apply``, and is
noted in ``journal``, so that a store on a file can write down what happened and others can replay it.

A *barrier* counts its *generation*: who arrives learns the current one, and may go on when it is past.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from procgroup.errors import QueueEmptyError, StoreLimitError
from procgroup.stores.store import (
    MAX_VALUE_BYTES,
    Store,
    check_same_length,
    checked_amount,
    checked_key,
    checked_keys,
    checked_value,
    checked_world_size,
    other_world_size,
    sum_of,
)
from procgroup.types import Timeout

T = TypeVar("T")

SET, DELETE, PUSH, POP, ARRIVE, WITHDRAW = range(1, 7)
Record = tuple[int, str, bytes]


@dataclass
class Barrier:
    """Who waits in a barrier (``callers``), for how many (``world_size``), and how often it has opened."""

    world_size: int = 0
    generation: int = 0
    callers: set[str] = field(default_factory=set)


class Table:
    """What a store holds. Not thread-safe: its store holds a lock around every use."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.barriers: dict[str, Barrier] = {}
        self.journal: list[Record] = []

    def change(self, kind: int, key: str, data: bytes = b"") -> None:
        """Make a change, and note it in the journal."""
        self.apply(kind, key, data)
        self.journal.append((kind, key, data))

    def apply(self, kind: int, key: str, data: bytes) -> None:
        """Make a change that is noted already."""
        if kind == SET:
            self.values[key] = data
        elif kind == DELETE:
            self.values.pop(key, None)
            self.queues.pop(key, None)
        elif kind == PUSH:
            self.queues.setdefault(key, deque()).append(data)
        elif kind == POP:
            self.queues[key].popleft()
            if not self.queues[key]:
                del self.queues[key]
        elif kind == ARRIVE:
            self._arrive(key, data)
        elif kind == WITHDRAW:
            self.barriers[key].callers.discard(data.decode())

    def _arrive(self, key: str, data: bytes) -> None:
        size, caller = data.decode().split(":", 1)
        barrier = self.barriers.setdefault(key, Barrier())
        barrier.world_size = int(size)
        barrier.callers.add(caller)
        if len(barrier.callers) >= barrier.world_size:
            barrier.generation += 1
            barrier.callers.clear()

    def has(self, key: str) -> bool:
        return key in self.values or key in self.queues

    def keys(self) -> set[str]:
        return self.values.keys() | self.queues.keys()

    def add(self, key: str, amount: int) -> int:
        total = sum_of(key, self.values.get(key, b"0"), amount)
        self.change(SET, key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if self.values.get(key, b"") != expected:
            return self.values.get(key, expected)
        self.change(SET, key, desired)
        return desired

    def delete(self, key: str) -> bool:
        existed = self.has(key)
        if existed:
            self.change(DELETE, key)
        return existed

    def append(self, key: str, tail: bytes) -> None:
        joined = self.values.get(key, b"") + tail
        if len(joined) > MAX_VALUE_BYTES:
            raise StoreLimitError(what="a value", size=len(joined), limit=MAX_VALUE_BYTES)
        self.change(SET, key, joined)

    def pop(self, key: str) -> bytes | None:
        if key not in self.queues:
            return None
        value = self.queues[key][0]
        self.change(POP, key)
        return value

    def arrive(self, key: str, world_size: int, caller: str) -> int:
        """Enter a barrier; return the generation that the caller waits to see pass."""
        barrier = self.barriers.setdefault(key, Barrier())
        if barrier.callers and barrier.world_size != world_size:
            raise other_world_size(key, barrier.world_size, world_size)
        generation = barrier.generation
        self.change(ARRIVE, key, f"{world_size}:{caller}".encode())
        return generation


class TableStore(Store):
    """A store over a Table; the stores that derive from it say how the table is locked and how to wait."""

    @abstractmethod
    def _run(self, operation: Callable[[Table], T]) -> T:
        """Run an operation on the table while nobody else does; keep its changes."""

    @abstractmethod
    def _await(
        self, operation: Callable[[Table], T | None], limit: float, keys: Sequence[str], what: str = "wait"
    ) -> T:
        """Run an operation again and again, until it returns something else than None."""

    @abstractmethod
    def _caller(self) -> str:
        """Name this call, among all calls of all processes on these keys."""

    def set(self, key: str, value: str | bytes) -> None:
        name, data = checked_key(key), checked_value(value)
        self._run(lambda table: table.change(SET, name, data))

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        name = checked_key(key)
        return self._await(lambda table: table.values.get(name), self._timeout_seconds(timeout), (name,))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        names = checked_keys(keys)
        self._await(lambda table: all(map(table.has, names)) or None, self._timeout_seconds(timeout), names)

    def add(self, key: str, amount: int) -> int:
        name, number = checked_key(key), checked_amount(amount)
        return self._run(lambda table: table.add(name, number))

    def check(self, keys: Sequence[str]) -> bool:
        names = checked_keys(keys)
        return self._run(lambda table: all(map(table.has, names)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        name, old, new = checked_key(key), checked_value(expected), checked_value(desired)
        return self._run(lambda table: table.compare_set(name, old, new))

    def delete_key(self, key: str) -> bool:
        name = checked_key(key)
        return self._run(lambda table: table.delete(name))

    def num_keys(self) -> int:
        return self._run(lambda table: len(table.keys()))

    def list_keys(self, prefix: str = "") -> list[str]:
        start = checked_key(prefix)
        return self._run(lambda table: [key for key in sorted(table.keys()) if key.startswith(start)])

    def append(self, key: str, value: str | bytes) -> None:
        name, tail = checked_key(key), checked_value(value)
        self._run(lambda table: table.append(name, tail))

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        names = checked_keys(keys)

        def read(table: Table) -> list[bytes] | None:
            if all(name in table.values for name in names):
                return [table.values[name] for name in names]
            return None

        return self._await(read, self._timeout_seconds(timeout), names)

    def get_unless(self, keys: Sequence[str], unless: str, timeout: Timeout | None = None) -> list[bytes] | bytes:
        names, other = checked_keys(keys), checked_key(unless)

        def read(table: Table) -> list[bytes] | bytes | None:
            if all(name in table.values for name in names):
                return [table.values[name] for name in names]
            return table.values.get(other)

        return cast(list[bytes] | bytes, self._await(read, self._timeout_seconds(timeout), names))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        check_same_length(keys, values)
        pairs = list(zip(checked_keys(keys), map(checked_value, values), strict=True))

        def write(table: Table) -> None:
            for name, data in pairs:
                table.change(SET, name, data)

        self._run(write)

    def queue_push(self, key: str, value: str | bytes) -> None:
        name, data = checked_key(key), checked_value(value)
        self._run(lambda table: table.change(PUSH, name, data))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        name = checked_key(key)
        if block:
            return self._await(lambda table: table.pop(name), self._timeout_seconds(timeout), (name,))
        value = self._run(lambda table: table.pop(name))
        if value is None:
            raise QueueEmptyError("queue is empty")
        return value

    def queue_len(self, key: str) -> int:
        name = checked_key(key)
        return self._run(lambda table: len(table.queues.get(name, ())))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        name, size, caller = checked_key(key), checked_world_size(world_size), self._caller()
        limit = self._timeout_seconds(timeout)
        generation = self._run(lambda table: table.arrive(name, size, caller))
        passed: Callable[[Table], bool | None] = lambda table: table.barriers[name].generation > generation or None  # noqa: E731
        try:
            self._await(passed, limit, (name,), "barrier")
        except BaseException:
            # Somebody may have come between the last look and this one; then the barrier was passed.
            if not self._run(lambda table: _withdraw(table, name, generation, caller)):
                raise


def _withdraw(table: Table, key: str, generation: int, caller: str) -> bool:
    """Leave a barrier; tell whether it has opened meanwhile."""
    if table.barriers[key].generation > generation:
        return True
    table.change(WITHDRAW, key, caller.encode())
    return False
