"""One program, written once, that plays cases on torch.distributed or on procgroup, on torch tensors or NumPy arrays.

Each rank reports for each case what is wrong with its arrays ("" when they are what NumPy says) or, when the call was
refused, the exception's type and text. The arrays that must not change are looked at too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from parity.cases import COMPLEX, FLOAT8, FLOATS, LAYOUTS, MIXED, Array, Case, combined, numpy_dtype, values


@dataclass(frozen=True)
class Report:
    """What one rank saw of one case. Both are "" when all was right."""

    wrong: str = ""
    refused: str = ""


class NumpyArrays:
    """Makes NumPy arrays, and reads them."""

    def wrap(self, array: Array) -> Any:
        return array

    def unwrap(self, array: Any) -> Array:
        return np.ascontiguousarray(array).reshape(-1)


class TorchTensors:
    """Makes torch tensors that share the memory of NumPy arrays, and reads them."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def wrap(self, array: Array) -> Any:
        if array.dtype.name == "bfloat16" or array.dtype.name in FLOAT8:
            bits = self._torch.from_numpy(array.view(f"u{array.dtype.itemsize}"))
            return bits.view(getattr(self._torch, array.dtype.name))
        return self._torch.from_numpy(array)

    def unwrap(self, tensor: Any) -> Array:
        flat = tensor.contiguous().reshape(-1)
        name = str(tensor.dtype).removeprefix("torch.")
        if name == "bfloat16" or name in FLOAT8:
            size = tensor.element_size()
            return np.asarray(flat.view(self._torch.uint8 if size == 1 else self._torch.uint16).numpy()).view(
                numpy_dtype(name)
            )
        return np.asarray(flat.numpy())


Library = NumpyArrays | TorchTensors


@dataclass
class Pending:
    """A call that was started: what to wait for, and then which arrays must have which elements."""

    works: Sequence[Any]
    checks: Sequence[tuple[str, Any, Array]]

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()


class Player:
    """Plays cases on one rank."""

    def __init__(self, dist: Any, library: Library, rank: int, size: int) -> None:
        self.dist, self.library, self.rank, self.size = dist, library, rank, size

    def play(self, case: Case, async_op: bool) -> Report:
        try:
            pending = self.start(case, async_op)
            pending.wait()
        except (RuntimeError, ValueError, TypeError) as error:
            return Report(refused=f"{type(error).__name__}: {error}")
        return Report(wrong=self.judge(pending))

    def start(self, case: Case, async_op: bool) -> Pending:
        """Start the call of a case; when ``async_op`` is not set it is over on return."""
        works, checks = getattr(self, f"_{case.verb}")(case, async_op)
        return Pending(works, checks)

    def judge(self, pending: Pending) -> str:
        """Tell what is wrong with the arrays of a call that is over; "" for nothing."""
        return "; ".join(text for check in pending.checks if (text := self._difference(*check)))

    def laid_out(self, case: Case, array: Array, part: int, written: bool) -> Array:
        """Return the same elements in the case's layout; ``written`` tells that the call writes them."""
        layout = case.layout
        if layout == MIXED:
            layout = LAYOUTS[(2 * self.rank + part + 1) % len(LAYOUTS)]
        if case.verb.endswith("_single") and layout == "fortran":
            layout = "strided"  # what is cut along the first dimension has one dimension here
        return laid_out(array, layout)

    def _difference(self, name: str, got: Any, want: Array) -> str:
        flat = self.library.unwrap(got)
        if flat.dtype != want.dtype or flat.size != want.size:
            return f"{name} has {flat.size} {flat.dtype} instead of {want.size} {want.dtype}"
        where = np.flatnonzero(~_same(flat, want))
        if not where.size:
            return ""
        first = where[0]
        return f"{where.size} of {want.size} elements of {name}: [{first}] = {flat[first]!r} instead of {want[first]!r}"

    def _mine(self, case: Case, part: int = 0, count: int | None = None, written: bool = False) -> Any:
        return self._array(case, self._values(case, self.rank, part, count), part, written)

    def _array(self, case: Case, elements: Array, part: int = 0, written: bool = False) -> Any:
        return self.library.wrap(self.laid_out(case, elements, part, written))

    def _values(self, case: Case, rank: int, part: int = 0, count: int | None = None) -> Array:
        return values(case, rank, part, case.count if count is None else count)

    def _unset(self, case: Case, count: int, part: int = 0) -> Any:
        """An array to be written, full of a value that no rank has: an element that nobody wrote shows."""
        dtype = numpy_dtype(case.dtype)
        return self._array(case, np.full(count * dtype.itemsize, 1, np.uint8).view(dtype), part, written=True)

    def _sum(self, case: Case, part: int = 0, count: int | None = None) -> Array:
        return combined(case, [self._values(case, rank, part, count) for rank in range(self.size)])

    def _op(self, case: Case) -> Any:
        return getattr(self.dist.ReduceOp, case.op)

    def _all_reduce(self, case: Case, async_op: bool) -> Any:
        array = self._mine(case, written=True)
        work = self.dist.all_reduce(array, self._op(case), async_op=async_op)
        return [work], [("tensor", array, self._sum(case))]

    def _reduce(self, case: Case, async_op: bool) -> Any:
        array = self._mine(case, written=True)
        work = self.dist.reduce(array, case.root, self._op(case), async_op=async_op)
        return [work], [("tensor", array, self._sum(case) if self.rank == case.root else self._values(case, self.rank))]

    def _scan(self, case: Case, async_op: bool) -> Any:
        return self._prefix(case, self.rank + 1, self.dist.scan, async_op)

    def _exscan(self, case: Case, async_op: bool) -> Any:
        return self._prefix(case, self.rank, self.dist.exscan, async_op)

    def _prefix(self, case: Case, sources: int, call: Any, async_op: bool) -> Any:
        array = self._mine(case, written=True)
        work = call(array, self._op(case), async_op=async_op)
        below = [self._values(case, rank) for rank in range(sources)]
        return [work], [("tensor", array, combined(case, below) if below else self._values(case, self.rank))]

    def _broadcast(self, case: Case, async_op: bool) -> Any:
        array = self._mine(case, written=self.rank != case.root)
        work = self.dist.broadcast(array, case.root, async_op=async_op)
        return [work], [("tensor", array, self._values(case, case.root))]

    def _gather(self, case: Case, async_op: bool) -> Any:
        array = self._mine(case)
        outputs = [self._unset(case, case.count, rank) for rank in range(self.size)] if self.rank == case.root else None
        work = self.dist.gather(array, outputs, case.root, async_op=async_op)
        got = [(f"gather_list[{rank}]", output, self._values(case, rank)) for rank, output in enumerate(outputs or [])]
        return [work], got

    def _all_gather(self, case: Case, async_op: bool) -> Any:
        lengths = case.pieces(self.size)
        array = self._mine(case, count=lengths[self.rank])
        outputs = [self._unset(case, length, rank) for rank, length in enumerate(lengths)]
        work = self.dist.all_gather(outputs, array, async_op=async_op)
        return [work], [
            (f"tensor_list[{rank}]", outputs[rank], self._values(case, rank, count=length))
            for rank, length in enumerate(lengths)
        ]

    def _all_gather_single(self, case: Case, async_op: bool) -> Any:
        array, output = self._mine(case), self._unset(case, case.count * self.size)
        work = self.dist.all_gather_single(output, array, async_op=async_op)
        return [work], [("output", output, np.concatenate([self._values(case, rank) for rank in range(self.size)]))]

    def _scatter(self, case: Case, async_op: bool) -> Any:
        output = self._unset(case, case.count)
        inputs = [self._mine(case, part) for part in range(self.size)] if self.rank == case.root else None
        work = self.dist.scatter(output, inputs, case.root, async_op=async_op)
        return [work], [("tensor", output, self._values(case, case.root, self.rank))]

    def _reduce_scatter(self, case: Case, async_op: bool) -> Any:
        lengths = case.pieces(self.size)
        inputs = [self._mine(case, part, length) for part, length in enumerate(lengths)]
        output = self._unset(case, lengths[self.rank])
        work = self.dist.reduce_scatter(output, inputs, self._op(case), async_op=async_op)
        kept = [
            (f"input_list[{part}]", inputs[part], self._values(case, self.rank, part, length))
            for part, length in enumerate(lengths)
        ]
        return [work], [("output", output, self._sum(case, self.rank, lengths[self.rank])), *kept]

    def _reduce_scatter_single(self, case: Case, async_op: bool) -> Any:
        whole = np.concatenate([self._values(case, self.rank, part) for part in range(self.size)])
        array, output = self._array(case, whole), self._unset(case, case.count)
        work = self.dist.reduce_scatter_single(output, array, self._op(case), async_op=async_op)
        return [work], [("output", output, self._sum(case, self.rank)), ("input", array, whole)]

    def _all_to_all(self, case: Case, async_op: bool) -> Any:
        sent, got = self._exchanged(case)
        inputs = [self._mine(case, part, length) for part, length in enumerate(sent)]
        outputs = [self._unset(case, length, part) for part, length in enumerate(got)]
        work = self.dist.all_to_all(outputs, inputs, async_op=async_op)
        return [work], [
            (f"output[{rank}]", outputs[rank], self._values(case, rank, self.rank, length))
            for rank, length in enumerate(got)
        ]

    def _all_to_all_single(self, case: Case, async_op: bool) -> Any:
        sent, got = self._exchanged(case)
        whole = np.concatenate([self._values(case, self.rank, part, length) for part, length in enumerate(sent)])
        array, output = self._array(case, whole), self._unset(case, sum(got))
        lists = (got, sent) if case.uneven else (None, None)
        work = self.dist.all_to_all_single(output, array, *lists, async_op=async_op)
        want = [self._values(case, rank, self.rank, length) for rank, length in enumerate(got)]
        return [work], [("output", output, np.concatenate(want)), ("input", array, whole)]

    def _exchanged(self, case: Case) -> tuple[list[int], list[int]]:
        """How many elements this rank sends to each rank, and gets from each."""
        return case.splits(self.rank, self.size), [case.splits(rank, self.size)[self.rank] for rank in range(self.size)]

    def _ring(self, case: Case, async_op: bool) -> Any:
        if self.size == 1:
            return [], []
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        array, got = self._mine(case), self._unset(case, case.count, 1)
        works = [self.dist.isend(array, after, tag=case.seed)]
        if async_op:
            works.append(self.dist.irecv(got, before, tag=case.seed))
        else:
            self.dist.recv(got, before, tag=case.seed)
            works.pop().wait()
        return works, [("received", got, self._values(case, before))]

    def _barrier(self, case: Case, async_op: bool) -> Any:
        return [self.dist.barrier(async_op=async_op)], []


def laid_out(array: Array, layout: str) -> Array:
    """Return a view with the elements of ``array`` in order, in memory that is laid out otherwise."""
    count = array.size
    if layout == "offset":
        buffer = np.zeros(count + 5, array.dtype)
        view = buffer[3 : 3 + count]
    elif layout == "strided":
        view = np.zeros(2 * count, array.dtype)[::2]
    elif layout == "column":
        view = np.zeros((count, 3), array.dtype)[:, 1]
    elif layout == "fortran":
        rows = 2 if count % 2 == 0 and count else 1
        view = np.zeros((count // rows, rows), array.dtype).T
        view[...] = array.reshape(rows, count // rows)
        return view
    else:
        return array.copy()
    view[:] = array
    return view


def _same(left: Array, right: Array) -> Array:
    """Which elements are equal to the bit; a NaN equals every NaN."""
    size = left.dtype.itemsize
    if left.dtype.name in COMPLEX:
        equal = left.view(f"u{size // 2}") == right.view(f"u{size // 2}")
        return np.asarray(equal.reshape(-1, 2).all(axis=1) | (left == right))
    equal = left.view(f"u{size}") == right.view(f"u{size}")
    return np.asarray(equal | (np.isnan(left) & np.isnan(right)) if left.dtype.name in FLOATS else equal)


def play_cases(
    dist: Any, library: Library, rank: int, size: int, cases: Sequence[Case], log: Callable[[str], None]
) -> list[Report]:
    """Play cases one after the other, blocking and async by turns."""
    player = Player(dist, library, rank, size)
    reports = []
    for number, case in enumerate(cases):
        log(str(case))
        reports.append(player.play(case, async_op=bool(number % 2)))
    return reports
