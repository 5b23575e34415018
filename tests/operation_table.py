"""The operations: how each is called, with which arrays, and what every array must hold afterwards.

`OPERATIONS` has a row for each operation; every suite that loops over operations takes them from here. A row is written
in terms of *blocks*: the elements that one rank gives to another. A `Part` is what one rank does in one call. A suite
says in a subclass which elements a block has, what a reduction gives, and the layout of an array in memory::

    part = Part("all_reduce", rank, size)
    part.start(dist, async_op=True)
    part.wait()
    assert not part.wrong()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from operation_rows import ROWS

import oracle
from oracle import Array


class Part:
    """One rank's part in one call. Here every element is 1; subclasses say otherwise."""

    is_uneven = False
    """Whether blocks differ in size, so that split sizes are passed."""
    shares_own_block = False
    """Whether an all_gather's input is its own output, too."""
    tag = 0
    to_the_bit = False
    """Whether a computed NaN and the sign of a computed complex zero must be the same as wanted, too."""
    receives_from_any = True
    """Whether a blocking receive of a ring leaves open who sends."""

    def __init__(
        self, name: str, rank: int, size: int, *, root: int = 0, op: Any = "SUM", count: int = 8, dtype: str = "float64"
    ) -> None:
        self.name, self.rank, self.size, self.root, self.op = name, rank, size, root, op
        self.count, self.dtype = count, oracle.numpy_dtype(dtype)
        self.row = OPERATIONS[name]
        self.held: list[Held] = []
        self._arguments: tuple[Any, ...] | None = None
        self._works: list[Any] = []

    def block(self, source: int, target: int = 0) -> Array:
        """Return the elements that ``source`` gives to ``target``, or to all (``target`` 0)."""
        return np.ones(self.count, self.dtype)

    def combined(self, blocks: Sequence[Array]) -> Array:
        """Return what the reduction makes of the blocks of these ranks."""
        return oracle.combined(self.op, blocks)

    def laid_out(self, elements: Array, place: int, is_written: bool) -> Array:
        """Return an array with these elements; ``place`` is its index in a list."""
        return elements.copy()

    def wrap(self, array: Array) -> Any:
        """Return what is passed to the call: it shares the memory of ``array``."""
        return array

    def prepare(self) -> tuple[Any, ...]:
        """Make the arrays, unless they are made, and return the arguments."""
        if self._arguments is None:
            self._arguments = self.row.arguments(self)
        return self._arguments

    def start(self, dist: Any, async_op: bool = False, **how: Any) -> None:
        """Call the operation of ``dist``: procgroup or torch.distributed. Another call takes the same arrays."""
        arguments = self.prepare()
        op = getattr(dist.ReduceOp, self.op) if isinstance(self.op, str) else self.op
        arguments = (*arguments, op) if self.row.reduces else arguments
        self._works = self.row.start(dist, self, arguments, async_op, how)

    def wait(self) -> None:
        for work in self._works:
            assert work.wait() is not False

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wrong(self) -> str:
        """Describe what is wrong with the arrays of a completed call; "" for nothing.

        Elements that were only moved are compared to the bit.
        """
        to_the_bit = self.to_the_bit or not self.row.reduces
        return "; ".join(filter(None, (held.unlike(held.wanted, to_the_bit) for held in self.held)))

    def changed(self) -> str:
        """Describe what has changed in the arrays of a call that was refused; "" for nothing."""
        return "; ".join(filter(None, (held.unlike(held.before, True) for held in self.held)))

    # What the rows are made of.

    @property
    def ranks(self) -> range:
        return range(self.size)

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    @property
    def own(self) -> Array:
        return self.block(self.rank)

    @property
    def of_all(self) -> list[Array]:
        return [self.block(source) for source in self.ranks]

    @property
    def given(self) -> list[Array]:
        return [self.block(self.rank, target) for target in self.ranks]

    @property
    def taken(self) -> list[Array]:
        return [self.block(source, self.rank) for source in self.ranks]

    @property
    def neighbors(self) -> list[int]:
        """The ranks before and behind this one: in a ring of more than two, and else in a row with two ends."""
        places = [self.rank - 1, self.rank + 1]
        return [place % self.size for place in places] if self.size > 2 else places

    @property
    def splits(self) -> tuple[list[int], list[int]]:
        return [block.size for block in self.taken], [block.size for block in self.given]

    def total(self, sources: Iterable[int], target: int = 0) -> Array:
        return self.combined([self.block(source, target) for source in sources])

    def input(self, elements: Array, place: int = 0) -> Any:
        """Make an array that the call must leave as it is."""
        return self._hold(f"input {place}", elements, elements, place, is_written=self.shares_own_block)

    def output(self, wanted: Array, place: int = 0) -> Any:
        """Make an array whose bytes are 1 until the call writes it: an element that nobody wrote shows."""
        unset = np.full(wanted.nbytes, 1, np.uint8).view(wanted.dtype)
        return self._hold(f"output {place}", unset, wanted, place, is_written=True)

    def in_place(self, wanted: Array) -> Any:
        """Make an array with this rank's elements, which the call may overwrite."""
        return self._hold("array", self.own, wanted, 0, is_written=True)

    def inputs(self, blocks: list[Array]) -> list[Any]:
        return [self.input(block, place) for place, block in enumerate(blocks)]

    def outputs(self, blocks: list[Array]) -> list[Any]:
        return [self.output(block, place) for place, block in enumerate(blocks)]

    def _hold(self, name: str, elements: Array, wanted: Array, place: int, is_written: bool) -> Any:
        array = self.laid_out(elements, place, is_written)
        self.held.append(Held(name, array, elements, wanted))
        return self.wrap(array)


class Held:
    """An array of a call, what it held before the call and what it must hold afterwards."""

    def __init__(self, name: str, array: Array, before: Array, wanted: Array) -> None:
        self.name, self.array, self.before, self.wanted = name, array, before, wanted
        memory = memory_of(array)
        self._memory = memory.copy() if memory.size != array.nbytes else None

    def unlike(self, wanted: Array, to_the_bit: bool) -> str:
        text = oracle.difference(self.array, wanted, to_the_bit)
        if not text and self._memory is not None and not self._is_alone_written(self._memory):
            text = "elements beside the array were written"
        return text and f"{self.name}: {text}"

    def _is_alone_written(self, before: Array) -> bool:
        if not self.array.flags.writeable:
            return np.array_equal(memory_of(self.array), before)
        elements = self.array.copy()
        self.array[...] = self.before.reshape(self.array.shape)
        is_unchanged = np.array_equal(memory_of(self.array), before)
        self.array[...] = elements
        return is_unchanged


def memory_of(array: Array) -> Array:
    """Return all bytes of the memory of an array."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


Start = Callable[[Any, Part, tuple[Any, ...], bool, dict[str, Any]], list[Any]]
"""Make the call with these arguments; return the works that are to be waited for."""


def _start_collective(
    dist: Any, part: Part, arguments: tuple[Any, ...], async_op: bool, how: dict[str, Any]
) -> list[Any]:
    work = getattr(dist, part.name)(*arguments, async_op=async_op, **how)
    assert async_op or work is None, f"a blocking call returned {work!r}"
    return [work] if async_op else []


def _start_message(dist: Any, part: Part, arguments: tuple[Any, ...], async_op: bool, how: dict[str, Any]) -> list[Any]:
    if async_op:
        return [getattr(dist, f"i{part.name}")(*arguments, **how)]
    getattr(dist, part.name)(*arguments, **how)
    return []


def _start_ring(dist: Any, part: Part, arguments: tuple[Any, ...], async_op: bool, how: dict[str, Any]) -> list[Any]:
    """Send to the next rank and receive from the one before; of blocking calls, rank 0 sends first."""
    if part.size == 1:
        return []
    sent, received = arguments
    send, receive = (partial(call, tag=part.tag, **how) for call in (dist.send, dist.recv))
    after, before = (part.rank + 1) % part.size, (part.rank - 1) % part.size
    if async_op:
        return [dist.isend(sent, after, tag=part.tag, **how), dist.irecv(received, before, tag=part.tag, **how)]
    if part.rank == 0:
        send(sent, after)
        assert receive(received, before) == before
    else:
        assert receive(received, None if part.receives_from_any else before) == before
        send(sent, after)
    return []


def _all_gather(part: Part) -> tuple[list[Any], Any]:
    tensor = part.input(part.own)
    outputs = [
        tensor if part.shares_own_block and source == part.rank else part.output(block, source)
        for source, block in enumerate(part.of_all)
    ]
    return outputs, tensor


@dataclass(frozen=True)
class Operation:
    """One row: a function of the library, and what sets it apart from the others."""

    arguments: Callable[[Part], tuple[Any, ...]]
    """Make the arrays of one rank and return its arguments, but for the reduce op, which comes last."""
    root: str
    """"source" or "destination", where one rank is that of all; of a message, the other rank is."""
    reduces: bool = False
    is_uneven: bool = False
    """Whether blocks may differ in size."""
    in_torch: bool = True
    start: Start = _start_collective


_ARGUMENTS: dict[str, Callable[[Part], tuple[Any, ...]]] = {
    "all_reduce": lambda p: (p.in_place(p.total(p.ranks)),),
    "reduce": lambda p: (p.in_place(p.total(p.ranks) if p.is_root else p.own), p.root),
    "scan": lambda p: (p.in_place(p.total(range(p.rank + 1))),),
    "exscan": lambda p: (p.in_place(p.total(range(p.rank)) if p.rank else p.own),),
    "reduce_scatter": lambda p: (p.output(p.total(p.ranks, p.rank)), p.inputs(p.given)),
    "reduce_scatter_single": lambda p: (p.output(p.total(p.ranks, p.rank)), p.input(np.concatenate(p.given))),
    "broadcast": lambda p: (p.input(p.own) if p.is_root else p.in_place(p.block(p.root)), p.root),
    "gather": lambda p: (p.input(p.own), p.outputs(p.of_all) if p.is_root else None, p.root),
    "all_gather": _all_gather,
    "all_gather_single": lambda p: (p.output(np.concatenate(p.of_all)), p.input(p.own)),
    "scatter": lambda p: (p.output(p.block(p.root, p.rank)), p.inputs(p.given) if p.is_root else None, p.root),
    "all_to_all": lambda p: (p.outputs(p.taken), p.inputs(p.given)),
    "all_to_all_single": lambda p: (
        p.output(np.concatenate(p.taken)),
        p.input(np.concatenate(p.given)),
        *(p.splits if p.is_uneven else ()),
    ),
    "neighbor_all_to_all": lambda p: (
        [p.output(p.block(rank, p.rank), place) if rank in p.ranks else None for place, rank in enumerate(p.neighbors)],
        [p.input(p.block(p.rank, rank), place) if rank in p.ranks else None for place, rank in enumerate(p.neighbors)],
        (p.size,),
        p.size > 2,
    ),
    "barrier": lambda p: (),
}
_NOT_IN_TORCH = ("neighbor_all_to_all", "scan", "exscan")

OPERATIONS = {
    **{name: Operation(make, *ROWS[name], in_torch=name not in _NOT_IN_TORCH) for name, make in _ARGUMENTS.items()},
    "send": Operation(lambda p: (p.input(p.own), p.root), "destination", start=_start_message),
    "recv": Operation(lambda p: (p.output(p.block(p.root)), p.root), "source", start=_start_message),
    "ring": Operation(
        lambda p: (p.input(p.own), p.output(p.block((p.rank - 1) % p.size))) if p.size > 1 else (),
        "",
        start=_start_ring,
    ),
}
"""Named as the functions of the library are, but for "ring": every rank sends to the next one."""

COLLECTIVES = [name for name, row in OPERATIONS.items() if row.start is _start_collective]
REDUCING = [name for name, row in OPERATIONS.items() if row.reduces]
EVERY_RANK = [*COLLECTIVES, "ring"]
"""What all ranks do together."""
