"""The wire format of objects: header, metadata and payload, and the segments in which the payload moves.

::

    header     1 KiB, the same size from every rank: kind of call, error if any, sizes of metadata and payload; then
               the metadata, and the payload too, when they fit (native/bindings/object_headers.cpp has its layout)
    metadata   the name of each object's type, its number of buffers, and the size of every buffer
    payload    the buffers, in segments: a large buffer alone, sent and received without a copy; small ones packed, or,
               where the group takes iovecs, gathered from their own memory

The first buffer of each object is its pickle stream. Every rank computes the same segments from the sizes in the
metadata. Nothing is allocated or read beyond the announced sizes, and the announced sizes are checked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from procgroup import _native
from procgroup.errors import MalformedObjects
from procgroup.groups import receive_pool
from procgroup.groups.calls import Iovecs
from procgroup.groups.pickling import Pickled, unpickle_object

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

HEADER_BYTES: int = _native.OBJECT_HEADER_BYTES
_INLINE_BYTES: int = _native.OBJECT_INLINE_BYTES

_ALIGNMENT = 64
# A buffer of this size is a segment of its own: packing it would cost more than a call does.
DIRECT_BYTES = 1 << 20
# Packed segments hold at most this much: enough that a call's own cost vanishes, little enough to stay in cache.
PACKED_BYTES = 2 << 20
# Segments up to this size in all are received into one allocation, which lives as long as any array in it does.
ALLOCATION_BYTES = 32 << 20


@dataclass(frozen=True)
class ObjectSegment:
    """Buffers ``first`` to ``last - 1``, moved together as ``size`` bytes; buffer ``i`` begins at ``offsets[i]``."""

    first: int
    last: int
    size: int
    offsets: tuple[int, ...]

    @property
    def is_joined(self) -> bool:
        """Whether the segment consists of several buffers."""
        return self.last - self.first > 1


def split_into_segments(sizes: Sequence[int], iovecs: bool = False) -> list[ObjectSegment]:
    """Split buffers of these sizes into segments; with ``iovecs`` they need no packing, so the segments are larger."""
    direct, limit = (ALLOCATION_BYTES, ALLOCATION_BYTES) if iovecs else (DIRECT_BYTES, PACKED_BYTES)
    segments: list[ObjectSegment] = []
    first, end = 0, 0
    offsets: list[int] = []
    for index, size in enumerate(sizes):
        begin = (end + _ALIGNMENT - 1) & -_ALIGNMENT
        if begin + size > limit or size >= direct:
            if offsets:
                segments.append(ObjectSegment(first, index, end, tuple(offsets)))
            first, begin, offsets = index, 0, []
        if size >= direct:
            segments.append(ObjectSegment(index, index + 1, size, (0,)))
            first, end = index + 1, 0
        else:
            offsets.append(begin)
            end = begin + size
    if offsets:
        segments.append(ObjectSegment(first, len(sizes), end, tuple(offsets)))
    return segments


class OutgoingObjects:
    """Pickled objects of this rank: their metadata and their payload in segments."""

    def __init__(self, pickled: Sequence[Pickled], iovecs: bool = False) -> None:
        self.pickled: Sequence[Pickled] = pickled
        self._takes_iovecs = iovecs
        self._staging: Bytes = np.empty(0, np.uint8)

    @cached_property
    def _buffers(self) -> list[memoryview]:
        return [buffer for each in self.pickled for buffer in (memoryview(each.stream), *each.buffers)]

    @cached_property
    def _sizes(self) -> list[int]:
        return [buffer.nbytes for buffer in self._buffers]

    @cached_property
    def segments(self) -> list[ObjectSegment]:
        """The segments in which the payload moves."""
        return split_into_segments(self._sizes, self._takes_iovecs)

    @cached_property
    def metadata(self) -> bytes:
        """What the receiver needs to know of the buffers."""
        return _write_metadata(self.pickled, self._sizes)

    @property
    def payload_size(self) -> int:
        """How many bytes the segments have in all."""
        return sum(segment.size for segment in self.segments)

    @property
    def is_whole(self) -> bool:
        """Whether a header holds all of it."""
        return len(self.metadata) + self.payload_size <= _INLINE_BYTES

    def iovecs(self, index: int) -> Iovecs:
        """Return a segment as its buffers, without a copy."""
        segment = self.segments[index]
        return Iovecs(self._buffers[segment.first : segment.last], segment.offsets, segment.size)

    def segment(self, index: int) -> Bytes:
        """Return the bytes of a segment, valid until the next call; empty beyond the last segment."""
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
class ObjectHeader:
    """One rank's header: the call, the number of objects, the sizes, and the bytes that fit into the header."""

    kind: int
    root: int
    count: int
    error: str | None = None
    metadata_size: int = 0
    payload_size: int = 0
    inline: bytes = b""

    def pack(self) -> bytes:
        """Return the header as bytes."""
        failed = self.error is not None
        inline = (self.error or "").encode()[:_INLINE_BYTES] if failed else self.inline
        return _native.pack_object_header(
            self.kind, self.root, self.count, failed, self.metadata_size, self.payload_size, inline
        )

    @staticmethod
    def unpack(raw: bytes) -> ObjectHeader:
        """Parse a header. Raises MalformedObjects."""
        fields = _native.unpack_object_header(raw)
        if fields is None:
            raise MalformedObjects("this is not an object of this version of procgroup")
        kind, root, count, failed, metadata, payload, inline = fields
        if failed:
            return ObjectHeader(kind, root, count, inline.decode(errors="replace"))
        return ObjectHeader(kind, root, count, None, metadata, payload, inline)

    @property
    def holds_metadata(self) -> bool:
        """Whether the metadata is in the header."""
        return self.metadata_size <= _INLINE_BYTES

    @property
    def holds_payload(self) -> bool:
        """Whether the payload is in the header, too."""
        return self.metadata_size + self.payload_size <= _INLINE_BYTES


def pack_whole_objects(kind: int, root: int, pickled: Sequence[Pickled]) -> bytes | None:
    """Return a header that holds small objects as a whole; None where they do not fit, or have arrays in them."""
    if any(each.buffers for each in pickled):
        return None
    names = [each.type_name for each in pickled]
    return _native.pack_whole_objects(kind, root, names, [each.stream for each in pickled])


def make_header(kind: int, root: int, count: int, outgoing: OutgoingObjects) -> ObjectHeader:
    """Return the header of a rank that sends ``outgoing``."""
    sizes = (len(outgoing.metadata), outgoing.payload_size)
    header = ObjectHeader(kind, root, count, None, *sizes)
    inline = outgoing.metadata if header.holds_metadata else b""
    if header.holds_payload:
        inline += b"".join(outgoing.segment(index).tobytes() for index in range(len(outgoing.segments)))
    return ObjectHeader(kind, root, count, None, *sizes, inline)


class IncomingObjects:
    """Objects of another rank: memory for their payload, which is then unpickled."""

    def __init__(self, header: ObjectHeader, metadata: bytes, iovecs: bool = False) -> None:
        """Parse the metadata. Raises MalformedObjects when it contradicts the header."""
        self.items: list[tuple[str, int]]
        self.items, self._sizes = _read_metadata(metadata, header.count)
        self.segments: list[ObjectSegment] = split_into_segments(self._sizes, iovecs)
        if sum(segment.size for segment in self.segments) != header.payload_size:
            raise MalformedObjects(f"the buffers do not add up to the {header.payload_size} bytes that were announced")
        self._memory: list[Bytes] = []
        self._buffers: list[memoryview] = []
        self._firsts = list(accumulate((count for _, count in self.items), initial=0))
        self._inline = header.inline[header.metadata_size :] if header.holds_payload else None
        if self._inline is not None and len(self._inline) != header.payload_size:
            raise MalformedObjects(f"{len(self._inline)} bytes came instead of the {header.payload_size} announced")

    def allocate(self) -> None:
        """Allocate memory for the payload. Raises MemoryError."""
        self._memory = _allocate([segment.size for segment in self.segments])
        if self._inline is not None:
            rest = np.frombuffer(self._inline, np.uint8)
            for memory in self._memory:
                memory[:], rest = rest[: memory.size], rest[memory.size :]
        self._buffers = self._slice_buffers()

    @property
    def pending_segments(self) -> int:
        """The number of segments to receive: 0 when the header holds the payload."""
        return len(self.segments) if self._inline is None else 0

    def memory(self, index: int) -> Bytes:
        """Return the memory to receive a segment into; empty beyond the last segment."""
        return self._memory[index] if index < self.pending_segments else np.empty(0, np.uint8)

    def unpickle(self, index: int, safe: bool) -> Any:
        """Unpickle an object. Raises what unpickling raises."""
        stream, *buffers = self._buffers[self._firsts[index] : self._firsts[index + 1]]
        return unpickle_object(stream, buffers, safe)

    def _slice_buffers(self) -> list[memoryview]:
        buffers: list[memoryview] = []
        for segment, received in zip(self.segments, self._memory, strict=True):
            memory = received.data
            sizes = self._sizes[segment.first : segment.last]
            buffers += [memory[offset : offset + size] for offset, size in zip(segment.offsets, sizes, strict=True)]
        return buffers


def as_bytes(buffer: memoryview) -> Bytes:
    """Return memory as an array of bytes, without a copy."""
    return np.frombuffer(buffer, np.uint8) if buffer.nbytes else np.empty(0, np.uint8)


def _allocate(sizes: Sequence[int]) -> list[Bytes]:
    """Return memory of each size; consecutive ones share one allocation of at most ALLOCATION_BYTES."""
    memory: list[Bytes] = []
    first, total = 0, 0
    for index, size in enumerate((*sizes, ALLOCATION_BYTES)):
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if total + rounded > ALLOCATION_BYTES or index == len(sizes):
            memory.extend(_divide(receive_pool.allocate(total), sizes[first:index]))
            first, total = index, 0
        total += rounded
    return memory


def _divide(allocation: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] - (-size // _ALIGNMENT) * _ALIGNMENT)
    return [allocation[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]


def _write_metadata(pickled: Sequence[Pickled], sizes: Sequence[int]) -> bytes:
    names = [each.type_name for each in pickled]
    counts = array("q", [1 + len(each.buffers) for each in pickled])
    lengths = array("q", map(len, names))
    return b"".join([counts.tobytes(), lengths.tobytes(), *names, array("q", sizes).tobytes()])


def _read_metadata(metadata: bytes, count: int) -> tuple[list[tuple[str, int]], list[int]]:
    """Return (type name, number of buffers) of each object, and all sizes."""
    if count * 16 > len(metadata):
        raise MalformedObjects(f"{len(metadata)} bytes of metadata are too few for {count} objects")
    counts = array("q", metadata[: count * 8])
    lengths = array("q", metadata[count * 8 : count * 16])
    end = count * 16 + sum(lengths)
    if min(lengths, default=0) < 0 or min(counts, default=1) < 1 or len(metadata) - end != 8 * sum(counts):
        raise MalformedObjects("the metadata has another length than its fields say")
    sizes = list(array("q", metadata[end:]))
    if min(sizes, default=0) < 0:
        raise MalformedObjects("a buffer of a negative size was announced")
    names, begin = [], count * 16
    for length in lengths:
        names.append(metadata[begin : begin + length].decode(errors="replace"))
        begin += length
    return list(zip(names, counts, strict=True)), sizes
