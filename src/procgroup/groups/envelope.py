"""How objects travel: what is announced of them, and into which pieces their bytes are cut.

::

    block     1 KiB, the same from everybody: what call this is, how it went, how much follows; then the letter,
              and the payload too, when they fit
    letter    the name of each object's type, how many buffers it has, and the size of every buffer
    payload   the buffers, in segments: a large one alone, straight from and into its memory; small ones packed,
              or, where the group takes parts, together from where they lie

The stream of each object is its first buffer. Everybody computes the same segments from the sizes in the letter.
Nothing is allocated or read beyond what was announced, and what was announced is checked.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from procgroup.groups.calls import Iovecs
from procgroup.groups.pickling import Pickled, pickle_object, unpickle_object
from procgroup.groups.slabs import make_room

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK_BYTES = 1024
_HEADER = struct.Struct("<4sHHiiqqq")
_MAGIC = b"pgo1"
_INLINE_BYTES = BLOCK_BYTES - _HEADER.size

_ALIGNMENT = 64
# A buffer of this size is a segment of its own: packing it would cost more than a call does.
DIRECT_BYTES = 1 << 20
# Packed segments hold at most this much: enough that a call's own cost vanishes, little enough to stay in cache.
PACKED_BYTES = 2 << 20
# Segments up to this size in all are received into one allocation, which lives as long as any array in it does.
SLAB_BYTES = 32 << 20


class MalformedEnvelope(ValueError):
    """What came is not what was announced, or not what any rank of this version announces."""


@dataclass(frozen=True)
class Segment:
    """Buffers ``first`` to ``last - 1``, moved together as ``size`` bytes; ``offsets`` tells where each begins."""

    first: int
    last: int
    size: int
    offsets: tuple[int, ...]

    @property
    def is_joined(self) -> bool:
        """Whether it is made up of several buffers."""
        return self.last - self.first > 1


def cut(sizes: Sequence[int], together: bool = False) -> list[Segment]:
    """Cut buffers of these sizes into segments; ``together``: which need not be packed, and so are larger."""
    direct, limit = (SLAB_BYTES, SLAB_BYTES) if together else (DIRECT_BYTES, PACKED_BYTES)
    segments: list[Segment] = []
    first, end = 0, 0
    offsets: list[int] = []
    for index, size in enumerate(sizes):
        begin = (end + _ALIGNMENT - 1) & -_ALIGNMENT
        if begin + size > limit or size >= direct:
            if offsets:
                segments.append(Segment(first, index, end, tuple(offsets)))
            first, begin, offsets = index, 0, []
        if size >= direct:
            segments.append(Segment(index, index + 1, size, (0,)))
            first, end = index + 1, 0
        else:
            offsets.append(begin)
            end = begin + size
    if offsets:
        segments.append(Segment(first, len(sizes), end, tuple(offsets)))
    return segments


class Parcel:
    """Objects of this rank, ready to be sent."""

    def __init__(self, objects: Sequence[Any], together: bool = False) -> None:
        """Pickle each object. Raises what pickling raises."""
        self.pickled: list[Pickled] = [pickle_object(value) for value in objects]
        self._buffers = [buffer for one in self.pickled for buffer in (one.stream, *one.buffers)]
        sizes = [buffer.nbytes for buffer in self._buffers]
        self.segments: list[Segment] = cut(sizes, together)
        self.letter: bytes = _write_letter(self.pickled, sizes)
        self.payload_size: int = sum(segment.size for segment in self.segments)
        self._staging: Bytes = np.empty(0, np.uint8)

    def iovecs(self, index: int) -> Iovecs:
        """Return a segment as it lies."""
        segment = self.segments[index]
        return Iovecs(self._buffers[segment.first : segment.last], segment.offsets, segment.size)

    def piece(self, index: int) -> Bytes:
        """Return the bytes of a segment, valid until the next call; none beyond the last one."""
        if index >= len(self.segments):
            return np.empty(0, np.uint8)
        segment = self.segments[index]
        if not segment.is_joined:
            return as_bytes(self._buffers[segment.first])
        if self._staging.size < segment.size:
            self._staging = np.empty(max(segment.size, min(self.payload_size, PACKED_BYTES)), np.uint8)
        buffers = self._buffers[segment.first : segment.last]
        for offset, buffer in zip(segment.offsets, buffers, strict=True):
            self._staging[offset : offset + buffer.nbytes] = as_bytes(buffer)
        return self._staging[: segment.size]


@dataclass(frozen=True)
class Block:
    """What one rank announces: the call, how many objects, what follows and what is here already."""

    kind: int
    root: int
    count: int
    error: str | None = None
    letter_size: int = 0
    payload_size: int = 0
    inline: bytes = b""

    def pack(self) -> Bytes:
        """Return the block as bytes."""
        failed = self.error is not None
        rest = (self.error or "").encode()[:_INLINE_BYTES] if failed else self.inline
        numbers = (self.letter_size, self.payload_size, len(rest))
        head = _HEADER.pack(_MAGIC, self.kind, failed, self.root, self.count, *numbers)
        return np.frombuffer((head + rest).ljust(BLOCK_BYTES, b"\0"), np.uint8)

    @staticmethod
    def unpack(block: Bytes) -> Block:
        """Read a block. Raises MalformedEnvelope."""
        magic, kind, failed, root, count, letter, payload, inline = _HEADER.unpack_from(block.data)
        if magic != _MAGIC or failed > 1 or min(count, letter, payload, inline) < 0 or inline > _INLINE_BYTES:
            raise MalformedEnvelope("this is no object of this version of procgroup")
        rest = block[_HEADER.size : _HEADER.size + inline].tobytes()
        if failed:
            return Block(kind, root, count, rest.decode(errors="replace"))
        return Block(kind, root, count, None, letter, payload, rest)

    @property
    def holds_letter(self) -> bool:
        """Whether the letter is in the block."""
        return self.letter_size <= _INLINE_BYTES

    @property
    def holds_payload(self) -> bool:
        """Whether the payload is in the block too."""
        return self.letter_size + self.payload_size <= _INLINE_BYTES


def announce(kind: int, root: int, count: int, parcel: Parcel | None) -> Block:
    """Return the block of a rank that sends ``parcel``, or nothing."""
    if parcel is None:
        return Block(kind, root, count)
    sizes = (len(parcel.letter), parcel.payload_size)
    block = Block(kind, root, count, None, *sizes)
    inline = parcel.letter if block.holds_letter else b""
    if block.holds_payload:
        inline += b"".join(parcel.piece(index).tobytes() for index in range(len(parcel.segments)))
    return Block(kind, root, count, None, *sizes, inline)


class Arrival:
    """Objects of another rank: memory for what was announced, then the objects."""

    def __init__(self, block: Block, letter: bytes, together: bool = False) -> None:
        """Read the letter. Raises MalformedEnvelope when it does not say what the block announces."""
        self.items: list[tuple[str, int]]
        self.items, self._sizes = _read_letter(letter, block.count)
        self.segments: list[Segment] = cut(self._sizes, together)
        if sum(segment.size for segment in self.segments) != block.payload_size:
            raise MalformedEnvelope(f"the buffers do not add up to the {block.payload_size} bytes that were announced")
        self._places: list[Bytes] = []
        self._buffers: list[memoryview] = []
        self._firsts = list(accumulate((count for _, count in self.items), initial=0))
        self._inline = block.inline[block.letter_size :] if block.holds_payload else None
        if self._inline is not None and len(self._inline) != block.payload_size:
            raise MalformedEnvelope(f"{len(self._inline)} bytes came instead of the {block.payload_size} announced")

    def allocate(self) -> None:
        """Make room for the payload. Raises MemoryError."""
        self._places = _allocate([segment.size for segment in self.segments])
        if self._inline is not None:
            rest = np.frombuffer(self._inline, np.uint8)
            for place in self._places:
                place[:], rest = rest[: place.size], rest[place.size :]
        self._buffers = self._cut_places()

    @property
    def pieces(self) -> int:
        """How many segments follow: none when the block holds the payload."""
        return len(self.segments) if self._inline is None else 0

    def place(self, index: int) -> Bytes:
        """Return where a segment goes; nowhere beyond the last one."""
        return self._places[index] if index < self.pieces else np.empty(0, np.uint8)

    def item(self, index: int, safe: bool) -> Any:
        """Put an object together. Raises what unpickling raises."""
        stream, *buffers = self._buffers[self._firsts[index] : self._firsts[index + 1]]
        return unpickle_object(stream, buffers, safe)

    def _cut_places(self) -> list[memoryview]:
        buffers: list[memoryview] = []
        for segment, place in zip(self.segments, self._places, strict=True):
            memory = place.data
            sizes = self._sizes[segment.first : segment.last]
            buffers += [memory[offset : offset + size] for offset, size in zip(segment.offsets, sizes, strict=True)]
        return buffers


def as_bytes(buffer: memoryview) -> Bytes:
    """Return memory as an array of bytes, without a copy."""
    return np.frombuffer(buffer, np.uint8) if buffer.nbytes else np.empty(0, np.uint8)


def _allocate(sizes: Sequence[int]) -> list[Bytes]:
    """Return room for each size; neighbours share one allocation as long as it is no larger than a slab."""
    places: list[Bytes] = []
    first, total = 0, 0
    for index, size in enumerate((*sizes, SLAB_BYTES)):
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if total + rounded > SLAB_BYTES or index == len(sizes):
            places.extend(_share(make_room(total), sizes[first:index]))
            first, total = index, 0
        total += rounded
    return places


def _share(slab: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] - (-size // _ALIGNMENT) * _ALIGNMENT)
    return [slab[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]


def _write_letter(pickled: Sequence[Pickled], sizes: Sequence[int]) -> bytes:
    names = [one.type_name.encode() for one in pickled]
    counts = array("q", [1 + len(one.buffers) for one in pickled])
    lengths = array("q", map(len, names))
    return b"".join([counts.tobytes(), lengths.tobytes(), *names, array("q", sizes).tobytes()])


def _read_letter(letter: bytes, count: int) -> tuple[list[tuple[str, int]], list[int]]:
    """Return (type name, number of buffers) of each object, and all sizes."""
    if count * 16 > len(letter):
        raise MalformedEnvelope(f"a letter of {len(letter)} bytes cannot tell of {count} objects")
    counts = array("q", letter[: count * 8])
    lengths = array("q", letter[count * 8 : count * 16])
    end = count * 16 + sum(lengths)
    if min(lengths, default=0) < 0 or min(counts, default=1) < 1 or len(letter) - end != 8 * sum(counts):
        raise MalformedEnvelope("the letter is not as long as what it tells of")
    sizes = list(array("q", letter[end:]))
    if min(sizes, default=0) < 0:
        raise MalformedEnvelope("a buffer of less than nothing was announced")
    names, begin = [], count * 16
    for length in lengths:
        names.append(letter[begin : begin + length].decode(errors="replace"))
        begin += length
    return list(zip(names, counts, strict=True)), sizes
