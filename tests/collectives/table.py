"""The table of the contract: each operation once by each of its schedules, in one world for a transport and a size.

The sizes follow from the limits of the library, and each rank compares the schedule that its call took with the one
that the table names: a schedule that no cell reaches any more shows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from collectives.contract_cases import DTYPES, SUPPORTED
from collectives.playing import Report, report
from operation_table import EVERY_RANK, OPERATIONS, REDUCING, memory_of
from seeded_cases import Case, CasePart

import procgroup as dist
from layouts import LAYOUTS, SHAPES
from oracle import Array, numpy_dtype
from procgroup import _native

SIZES = [1, 2, 3, 4, 5]
LIMITS = _native.schedule_limits()
PARTS = LIMITS["slots"] + 1.3
"""Of a call in many parts: so many that each slot is used again, and a last one that is shorter."""
SEGMENTS = 3.3
"""Of a message in many segments: some are received while others are reduced, by turns."""

INPUT_BLOCKS = ("reduce_scatter", "scatter", "all_to_all", "neighbor_all_to_all")
BY_PAIR = ("all_to_all", "neighbor_all_to_all")
BLOCKS = (*INPUT_BLOCKS, "gather", "all_gather")
LARGE = [
    ("int32", "SUM"),
    ("float32", "SUM"),
    ("uint8", "BXOR"),
    ("float64", "MAX"),
    ("float32", "AVG"),
    ("int64", "MIN"),
]
"""Of calls that are not small. Elements that are moved have any bits in each dtype."""
WIDENED = ("bfloat16", "SUM")
WITHOUT_PARTIAL_RESULTS = ("int32", "AVG")
PREPARED = ("int16", "LXOR")
"""The call reads memory of its own, which is in no arena."""

LATE_SECONDS = 0.002
BURST = 12
BURST_BYTES = 8 << 20


@dataclass(frozen=True)
class Cell:
    """A case, how it is to be carried out, and under which conditions."""

    case: Case
    schedule: str
    """"small", the name of a schedule, or "" for messages, which have none."""
    what: str
    in_arena: bool = False
    late: int = -1
    """The rank that comes a moment later than the others."""

    @property
    def bytes(self) -> int:
        """Those of the largest block."""
        return (self.case.count + max(self.case.lengths, default=0)) * numpy_dtype(self.case.dtype).itemsize

    def __str__(self) -> str:
        late = f", rank {self.late} late" if self.late >= 0 else ""
        return f"{self.case}, {self.what}: {self.schedule or 'message'}{late}"


class ArenaPart(CasePart):
    """A part whose arrays are in memory that the ranks of a host share."""

    def laid_out(self, elements: Array, place: int, is_written: bool) -> Array:
        array = dist.empty(elements.size, elements.dtype)
        array[:] = elements
        return array


def table(hosts: Sequence[int]) -> list[Cell]:
    """Return the cells for ranks on these hosts."""
    size = len(hosts)
    ways = [(name, way) for name in EVERY_RANK for way in _ways(name, hosts)]
    for number, pair in enumerate(SUPPORTED):
        ways.append((REDUCING[(number + size) % len(REDUCING)], Way("every dtype and op", "small", 500, pair)))
    return [_cell(name, size, number, way) for number, (name, way) in enumerate(ways, size)]


@dataclass(frozen=True)
class Way:
    """How an operation is carried out from so many bytes of a block on."""

    what: str
    schedule: str
    bytes: float
    pair: tuple[str, str] | None = None
    largest: float = 0
    """The bytes of one block, where the others have fewer."""
    in_arena: bool = False


def _cell(name: str, size: int, number: int, way: Way) -> Cell:
    pairs = LARGE if way.schedule != "small" and OPERATIONS[name].reduces else [(dtype, "SUM") for dtype in DTYPES]
    dtype, op = way.pair or pairs[number % len(pairs)]
    itemsize = numpy_dtype(dtype).itemsize
    count = -(-int(way.bytes) // itemsize)
    lengths: tuple[int, ...] = ()
    if way.largest:
        more = [0] * (size + 1 if name.removesuffix("_single") in BY_PAIR and size > 1 else size)
        more[2 % size], more[1 % size] = -count, int(way.largest) // itemsize - count
        lengths = tuple(more)
    case = Case(
        name,
        dtype,
        count,
        op,
        root=size - 1 if way.what == "many parts" else number % size,
        lengths=lengths,
        layouts=tuple(_small_layouts(number) if way.schedule == "small" else SHAPES),
        values="accumulated",
        shares_own_block=number % 2 == 1,
        seed=number,
    )
    return Cell(case, way.schedule, way.what, way.in_arena, number // 2 % size if number % 2 and size > 1 else -1)


def _small_layouts(number: int) -> list[str]:
    """Return the layouts of a call on five ranks; all have their turn. Those in steps would make large calls slow."""
    return [list(LAYOUTS)[(5 * number + place) % len(LAYOUTS)] for place in range(5)]


def _ways(name: str, hosts: Sequence[int]) -> Iterator[Way]:
    if name == "barrier":
        yield Way("without elements", "small", 0)
    elif name == "ring":
        yield from _ways_of_messages(hosts)
    elif name == "neighbor_all_to_all" and len(hosts) == 1:
        yield Way("without neighbours", "small", 0)
    else:
        kind = name.removesuffix("_single")
        yield from _small_ways(kind, len(hosts))
        spans_hosts = len(set(hosts)) > 1
        yield from _ways_between_hosts(name, kind, hosts) if spans_hosts else _ways_in_memory(name, kind, len(hosts))


def _given(kind: str, size: int) -> int:
    """Return how many blocks the rank gives that gives the most."""
    if kind == "neighbor_all_to_all":
        return min(size - 1, 2)
    return size if kind in INPUT_BLOCKS else 1


def _small_ways(kind: str, size: int) -> Iterator[Way]:
    given = _given(kind, size)
    yield Way("nothing", "small", 0)
    yield Way("beside the announcement", "small", LIMITS["inline"] // given // 8 * 8)
    yield Way("in a small area", "small", 500)


def _ways_in_memory(name: str, kind: str, size: int) -> Iterator[Way]:
    given = _given(kind, size)
    lanes = {**dict.fromkeys((*BY_PAIR, "scatter"), size - 1), "reduce_scatter": size if size > 2 else 1}.get(kind, 1)
    part = LIMITS["chunk"] / max(lanes, 1)
    schedule = "blocks" if kind in BLOCKS else "slots"
    if kind not in BY_PAIR:  # their buffer table takes a part of the small area
        yield Way("as much as is small", "small", LIMITS["small"] // given // 8 * 8)
    yield Way("a little more", schedule, LIMITS["small"] // given + 16)
    if OPERATIONS[name].reduces:
        yield Way("prepared", schedule, LIMITS["small"] // given + 16, PREPARED)
    start, end = LIMITS["read in place"][kind]  # where the kernel reads ordinary arrays
    many = PARTS * part
    is_read = start <= many < end
    if is_read:
        many = end if end < start << 8 else start - 8
    if kind == "all_reduce":
        yield Way("many parts", "slots" if size == 2 else "scattered", many)
        yield Way("direct to the end", "slots", LIMITS["direct"])
        if size == 2:
            yield Way("exchanged", "exchanged", LIMITS["exchanged"], ("int32", "SUM"))
        else:
            yield Way("no more direct", "scattered", LIMITS["direct"] + 8)
    else:
        yield Way("many parts", schedule, many)
    if OPERATIONS[name].is_uneven and not is_read:
        yield Way("parts in unequal numbers", schedule, part, largest=PARTS * part)
    if kind in ("scan", "exscan"):  # each rank reads other arrays
        return
    yield Way("an array in the arena", "read in place", LIMITS["small"] + 16, in_arena=True)
    if name != kind:  # its schedules are those of the operation on a list
        return
    several = LIMITS["read at a time"] * 1.1
    yield _one_large("parts of an array in the arena", name, several, in_arena=True)
    if start < end:
        yield _one_large("read by the kernel", name, start)


def _one_large(what: str, name: str, size: float, in_arena: bool = False) -> Way:
    """Return a way of arrays that are read in place; where blocks may differ, one alone is so large."""
    if OPERATIONS[name].is_uneven:
        return Way(what, "read in place", 40_000, largest=size, in_arena=in_arena)
    return Way(what, "read in place", size, in_arena=in_arena)


def _ways_between_hosts(name: str, kind: str, hosts: Sequence[int]) -> Iterator[Way]:
    size = len(hosts)
    is_flat = len(set(hosts)) == size
    by_host = "messages" if is_flat or kind in ("scan", "exscan") else "hierarchical"
    # Each rank reduces a part of an array.
    segments = SEGMENTS * LIMITS["segment"] * (size if kind in ("reduce", "all_reduce") else 1)
    yield Way("one part", by_host, LIMITS["small"] + 16)
    if OPERATIONS[name].reduces:
        yield Way("prepared", by_host, LIMITS["small"] + 16, PREPARED)
    yield Way("many parts", by_host, PARTS * LIMITS["chunk"] if by_host == "hierarchical" else segments)
    if OPERATIONS[name].is_uneven:
        yield Way("parts in unequal numbers", by_host, LIMITS["chunk"] / 2, largest=PARTS * LIMITS["chunk"])
    if OPERATIONS[name].reduces and by_host == "hierarchical":
        yield Way("widened", by_host, 2.5 * LIMITS["chunk"], WIDENED)
        yield Way("without partial results", "messages", segments, WITHOUT_PARTIAL_RESULTS)


def _ways_of_messages(hosts: Sequence[int]) -> Iterator[Way]:
    yield Way("eager", "", 500)
    yield Way("eager to the end", "", LIMITS["eager message"])
    yield Way("streamed", "", min(PARTS * LIMITS["chunk"], LIMITS["message read in place"] - 8))
    if len(set(hosts)) == 1:
        yield Way("read by the kernel", "", LIMITS["message read in place"] * 1.1)


def play_table(rank: int, size: int, cells: Sequence[Cell], timeout: float = 20.0) -> list[Report]:
    """Play cells in bursts, each without anything between its calls, blocking and async by turns."""
    dist.init_process_group(timeout=timeout)
    reports: list[Report] = []
    while len(reports) < len(cells):
        reports += _play_burst(rank, size, cells[len(reports) :])
    dist.barrier()
    dist.destroy_process_group()
    return reports


def _play_burst(rank: int, size: int, cells: Sequence[Cell]) -> list[Report]:
    parts: list[tuple[Cell, CasePart]] = []
    room = BURST_BYTES
    for cell in cells[:BURST]:
        room -= cell.bytes
        if parts and room < 0:
            break
        part = (ArenaPart if cell.in_arena else CasePart)(cell.case, rank, size)
        part.prepare()
        parts.append((cell, part))
    schedules = [_call(cell, part, async_op=number % 2 == 1) for number, (cell, part) in enumerate(parts)]
    return [_judged(cell, part, schedule) for (cell, part), schedule in zip(parts, schedules, strict=True)]


def _call(cell: Cell, part: CasePart, async_op: bool) -> str:
    """Make the call, and return the name of its schedule."""
    if cell.late == part.rank:
        time.sleep(LATE_SECONDS)
    try:
        part.start(dist, async_op)
        part.wait()
    except Exception as error:
        where = f"rank {part.rank} of {part.size}"
        raise AssertionError(f"{where}, {cell}: {type(error).__name__}: {error}") from error
    _invert(part)  # no rank may read the arrays of a call that is done, nor write into them
    group: Any = dist.group.WORLD
    return str(group.calls.last_schedule)


def _invert(part: CasePart) -> None:
    for held in part.held:
        memory = memory_of(held.array)
        np.invert(memory, out=memory)


def _judged(cell: Cell, part: CasePart, schedule: str) -> Report:
    _invert(part)
    wrong, bits = report(part)
    if not wrong and part.size > 1 and cell.schedule and schedule != cell.schedule:
        wrong = f"the schedule {schedule!r} was chosen instead"
    return wrong, bits
