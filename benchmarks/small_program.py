"""What a rank calls in small_things.py, whichever library it has: the parts that are the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from procgroup.diagnostics.bench.rank_loop import BenchArrays, Call

TASKS = 200
"""How many tasks one call of master_worker hands out."""
LEAVES = 200
THING = (7, "seven", 0.7)


class Program(ABC):
    """What one rank calls; ``right`` and ``left`` are its neighbours in a ring."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.right = (rank + 1) % size
        self.left = (rank - 1) % size
        self.cells = np.full(102, float(rank))
        self.arrays = {f"layer{index}": np.full(4, 1.0 + rank) for index in range(LEAVES)}

    def expect(self, found: Any, expected: Any) -> None:
        if found != expected:
            raise ArithmeticError(f"rank {self.rank} got {found!r}, expected {expected!r}")

    @abstractmethod
    def exchange_edges(self) -> None:
        """Give the outermost cells to the neighbours, and take theirs."""

    def step(self) -> None:
        """One step of the guide's program."""
        self.exchange_edges()
        self.cells[1:-1] += 0.25 * (self.cells[:-2] - 2 * self.cells[1:-1] + self.cells[2:])

    @abstractmethod
    def put(self, thing: Any, rank: int) -> None:
        """Send an object."""

    @abstractmethod
    def take(self, rank: int) -> Any:
        """Receive an object."""

    @abstractmethod
    def take_any(self) -> tuple[Any, int]:
        """Receive an object from any rank; return it and its sender."""

    @abstractmethod
    def meet(self) -> None:
        """Wait for all ranks: a worker's first request of the next call is not one of this call."""

    def ping_pong(self) -> None:
        if self.rank == 0:
            self.put(THING, 1)
            self.expect(self.take(1), THING)
        elif self.rank == 1:
            self.put(self.take(0), 0)

    def master_worker(self) -> None:
        """Rank 0 hands out tasks to whoever asks; each worker sends its result with the next request."""
        if self.rank == 0:
            self._hand_out()
        else:
            self.put(None, 0)
            while (task := self.take(0)) is not None:
                self.put(task * task, 0)
        self.meet()

    def _hand_out(self) -> None:
        total, next_task, working = 0, 0, self.size - 1
        while working:
            result, worker = self.take_any()
            total += result or 0
            if next_task < TASKS:
                self.put(next_task, worker)
                next_task += 1
            else:
                self.put(None, worker)
                working -= 1
        self.expect(total, sum(task * task for task in range(TASKS)))

    @abstractmethod
    def calls(self) -> dict[str, tuple[Call, Any]]:
        """Return the calls that the library has in another form, by the operation, with their results on this rank."""

    def operations(self) -> dict[str, Callable[[BenchArrays], Call]]:
        """Return what is measured, by name, for ``serve``."""
        calls: dict[str, tuple[Call, Any]] = {
            **self.calls(),
            "sendrecv_array": (self.exchange_edges, None),
            "guide_step": (self.step, None),
            "object_ping_pong": (self.ping_pong, None),
            "master_worker": (self.master_worker, None),
        }
        return {name: self._checked(*call) for name, call in calls.items()}

    def _checked(self, call: Call, result: Any) -> Callable[[BenchArrays], Call]:
        def prepare(_: BenchArrays) -> Call:
            found = call()
            if isinstance(found, dict):
                found = {name: array.tolist() for name, array in found.items()}
            self.expect(found, result)
            return call

        return prepare

    def sums(self) -> dict[str, list[float]]:
        """Return the elements of the sums of ``arrays``."""
        return {name: [self.size * (self.size + 1) / 2] * 4 for name in self.arrays}


def concatenate(one: list[int], other: list[int]) -> list[int]:
    """An operation of the user's own."""
    return one + other
