"""Calls whose arrays follow from a seed, and what they hold afterwards by NumPy: for the contract of backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from procgroup import _native
from procgroup.arrays.array_view import numpy_dtype
from procgroup.errors import PeerFailed, PeerLost
from procgroup.groups.group import ProcessGroup
from procgroup.types import ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]

OPERATIONS = {
    row["name"]: row for row in _native.operations() if row["sizes"] != "per pair" or row["name"] == "all_to_all"
}
"""A backend makes every operation by pair as an all_to_all."""
FUNCTIONS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
}
"""What combines the elements of the ranks for each reduce op; a mean is divided, and a factor is applied, besides."""
LOGICAL = ("LAND", "LOR", "LXOR")
"""These give 0 or 1, of one rank's elements too."""
_FACTOR = 2.0
"""That of PREMUL_SUM."""


@dataclass(frozen=True)
class Case:
    """One call on all ranks. A *block* has the elements that one rank gives to another."""

    op: str
    """A name of ``_native.operations()``; "send" is a send to another rank, and a receive from one."""
    dtype: str
    reduce_op: str
    size: int
    count: int = 5
    """How many elements a block has."""
    root: int = 0
    seed: int = 0
    """An odd one makes a collective asynchronous. It is the tag of messages."""
    is_uneven: bool = False
    """Whether some blocks have one or two more elements."""
    distance: int = 1
    """Messages go to the rank that is so many ranks further on."""

    def __str__(self) -> str:
        op = f"{self.op}({self.reduce_op})" if self.reduce_op else self.op
        more = f" to {self.count + 2}" if self.is_uneven else ""
        root = f", root {self.root}" if self.has_root else f", tag {self.seed}" if self.op == "send" else ""
        return f"{op} of {self.count}{more} {self.dtype} on {self.size} ranks{root}, seed {self.seed}"

    @property
    def has_root(self) -> bool:
        return "root" in OPERATIONS[self.op]["givers"] + OPERATIONS[self.op]["takers"]

    def block(self, source: int, target: int = 0) -> Array:
        """Return what ``source`` gives to ``target``, or to all. What is reduced is exact, in any order."""
        place = {"all_gather": source, "reduce_scatter": target}.get(self.op, 2 * source + target)
        count = self.count + (place % 3 if self.is_uneven else 0)
        random, dtype = np.random.default_rng([self.seed, source, target]), numpy_dtype(self.dtype)
        if self.dtype == "bool":
            return np.asarray(random.integers(0, 2, count, bool))
        if not self.reduce_op:
            return np.asarray(random.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype))
        with_zeros = self.reduce_op in ("AVG", *LOGICAL)
        numbers = 12 * random.integers(0, 3, count) if with_zeros else random.integers(1, 4, count)
        return np.asarray(numbers * (1 + 1j) if dtype.kind == "c" else numbers).astype(dtype)

    def sources(self, rank: int) -> Sequence[int]:
        """Return the ranks of which ``rank`` receives blocks."""
        row = OPERATIONS[self.op]
        if self.op == "send":
            return [(rank - self.distance) % self.size]
        takes = {"root": rank == self.root, "all but root": rank != self.root, "all but first": rank > 0}
        if not takes.get(row["takers"], True):
            return []
        if row["givers"] == "root":
            return [self.root]
        return range({"scan": rank + 1, "exscan": rank}.get(self.op, self.size))

    def results(self, rank: int) -> list[Array]:
        """Return the blocks that ``rank`` has received afterwards."""
        target = rank if OPERATIONS[self.op]["input"] == "blocks" else 0
        blocks = [self.block(source, target) for source in self.sources(rank)]
        if not blocks or not self.reduce_op:
            return blocks
        total = FUNCTIONS[self.reduce_op].reduce(blocks)
        if self.reduce_op in ("AVG", "PREMUL_SUM"):
            total = total / len(blocks) if self.reduce_op == "AVG" else total * _FACTOR
        return [total.astype(blocks[0].dtype)]


class Part:
    """One rank's part in a case."""

    def __init__(self, case: Case, group: ProcessGroup) -> None:
        self._case, self._group, self._rank = case, group, group.rank()
        self._held: list[tuple[str, Array, Array]] = []
        self._arguments = self._make_arguments()
        self._works: list[Any] = []

    def start(self) -> None:
        """Issue the call."""
        case, group = self._case, self._group
        if case.op == "send":
            received, sent = self._arguments
            after, before = ((self._rank + step) % case.size for step in (case.distance, -case.distance))
            self._works = [group.send(sent, after, case.seed, async_op=True), group.irecv(received, before, case.seed)]
        else:
            work = getattr(group, case.op)(*self._arguments, async_op=case.seed % 2 == 1)
            self._works = [] if work is None else [work]

    def wait(self) -> None:
        """Wait until the call has completed."""
        for work in self._works:
            work.wait()

    def compare(self) -> None:
        """Raise AssertionError unless the arrays hold what they should."""
        for name, array, wanted in self._held:
            if array.tobytes() != wanted.tobytes():
                index = np.flatnonzero(array.view(np.uint8) != wanted.view(np.uint8))[0] // array.itemsize
                raise self.error(f"{name}: [{index}] is {array[index]} instead of {wanted[index]}")

    def error(self, text: str) -> AssertionError:
        return AssertionError(f"{self._case}, rank {self._rank}: {text}")

    def _make_arguments(self) -> list[Any]:
        case, rank, row = self._case, self._rank, OPERATIONS[self._case.op]
        results = case.results(rank)
        if (row["input"], row["output"]) == ("one", "one"):
            arguments = self._hold("array", [case.block(rank)], results or [case.block(rank)])
        else:
            targets = range(case.size) if row["input"] == "blocks" else [0]
            given = [case.block(rank, target) for target in targets]
            inputs = self._hold("input", given, given) if row["givers"] != "root" or rank == case.root else []
            unset = [np.ones(block.nbytes, np.uint8).view(block.dtype) for block in results]
            outputs = self._hold("output", unset, results)
            if case.op == "all_gather" and case.seed % 4 > 1:  # the input is an output, too
                outputs[rank][:] = inputs[0]
                inputs = [outputs[rank]]
            lists = [(outputs, row["output"]), (inputs, row["input"])][:: -1 if case.op == "gather" else 1]
            arguments = [(blocks if kind == "blocks" else blocks[0]) if blocks else None for blocks, kind in lists]
        if case.has_root:
            arguments.append(case.root)
        if case.reduce_op:
            op = ReduceOp[case.reduce_op]
            arguments.append(op(_FACTOR) if op is ReduceOp.PREMUL_SUM else op)
        return arguments

    def _hold(self, name: str, before: list[Array], wanted: list[Array]) -> list[Any]:
        arrays = [block.copy() for block in before]
        self._held += [(f"{name} {place}", *pair) for place, pair in enumerate(zip(arrays, wanted, strict=True))]
        return arrays


def play(*parts: Part) -> None:
    """Make calls that are in progress together. Raises AssertionError unless they do what they should."""
    part = parts[0]
    try:
        for part in parts:
            part.start()
        for part in reversed(parts):
            part.wait()
    except (PeerFailed, PeerLost):  # the rank that this names says more
        raise
    except Exception as error:
        raise part.error(f"the backend supports this call, but it raised {type(error).__name__}: {error}") from error
    for part in parts:
        part.compare()
