"""The recorder knows the line of the program that makes a call, whatever is between the two on the Python stack."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np

import procgroup as dist
from world import run

TIMES = 3  # found by the stack's frames at first, then by what is remembered of the place


class Calls:
    """Makes calls, and compares the lines that were recorded of them with those that Python gives."""

    def __init__(self) -> None:
        dist.init_process_group(timeout=10)
        self.array = np.ones(2)
        self.wrong: list[str] = []

    def reduce(self, _: object = None) -> None:
        """Stands for the program's own function: the line is the one in here."""
        dist.all_reduce(self.array), self.compare(sys._getframe().f_lineno)

    def compare(self, line: int) -> None:
        recorded = dist.group.WORLD.records()[-1]["source"]  # type: ignore[union-attr]
        if recorded != f"{__file__}:{line}":
            self.wrong.append(f"{recorded}, expected line {line}")

    def here(self, made: object = None) -> None:
        """The call was made in the caller's line."""
        self.compare(sys._getframe(1).f_lineno)


def make_calls_from_many_places(rank: int, size: int) -> list[str]:
    calls = Calls()
    array = calls.array
    for _ in range(TIMES):
        calls.here(dist.all_reduce(array))
        calls.here(dist.all_reduce(array)), calls.here(dist.barrier())
        calls.here(dist.group.WORLD.all_reduce(array, dist.ReduceOp.SUM, False, None))  # type: ignore[union-attr]
        calls.here(dist.all_reduce(array, async_op=True).wait())
        calls.here(functools.partial(dist.all_reduce, array)())
        calls.here(list(map(dist.all_reduce, [array, array])))
        calls.here(sorted([1, 2], key=lambda _: dist.all_reduce(array) or 0))
        calls.here(dist.all_gather_object([None], {"an": "object"}))
        calls.here([dist.all_reduce(array) for _ in range(2)])
        list(map(calls.reduce, range(2)))
        for function in (nested(calls, 5), by_exec(calls), by_generator(calls), in_thread(calls), by_asyncio(calls)):
            function()
    return calls.wrong


def nested(calls: Calls, depth: int) -> Callable[[], object]:
    def recurse(left: int) -> None:
        if left > 0:
            recurse(left - 1)
        calls.here(dist.all_reduce(calls.array))

    return lambda: recurse(depth)


def by_exec(calls: Calls) -> Callable[[], object]:
    code = compile("\n" * 899 + "for _ in range(2): reduce(array); compare(900)", __file__, "exec")
    return lambda: exec(code, {"reduce": dist.all_reduce, "array": calls.array, "compare": calls.compare})


def by_generator(calls: Calls) -> Callable[[], object]:
    def generate() -> Iterator[None]:
        while True:
            calls.here(dist.all_reduce(calls.array))
            yield

    generator = generate()
    return lambda: (next(generator), next(generator))


def in_thread(calls: Calls) -> Callable[[], object]:
    def start() -> None:
        thread = threading.Thread(target=calls.reduce)
        thread.start()
        thread.join()

    return start


def by_asyncio(calls: Calls) -> Callable[[], object]:
    async def reduce() -> None:
        calls.here(dist.all_reduce(calls.array))

    async def gather() -> None:
        await asyncio.gather(reduce(), reduce())

    return lambda: asyncio.run(gather())


def test_the_line_of_every_call_is_recorded() -> None:
    assert run(make_calls_from_many_places, 1) == [[]]
