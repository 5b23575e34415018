"""The wire format of objects: headers, metadata and segments; the receive pool; what is refused."""

from __future__ import annotations

import copyreg
import pickle
from array import array
from typing import Any

import numpy as np
import pytest

from procgroup import _native
from procgroup.errors import MalformedObjects
from procgroup.groups import receive_pool
from procgroup.groups.object_format import (
    ALLOCATION_BYTES,
    DIRECT_BYTES,
    PACKED_BYTES,
    IncomingObjects,
    ObjectHeader,
    OutgoingObjects,
    make_header,
    pack_whole_objects,
    split_into_segments,
)
from procgroup.groups.pickling import pickle_object, rebuild_dtype, rebuild_tensor, unpickle_object


def pickled(values: list[Any], iovecs: bool = False) -> OutgoingObjects:
    return OutgoingObjects([pickle_object(value) for value in values], iovecs)


def move(outgoing: OutgoingObjects, iovecs: bool = False) -> IncomingObjects:
    header = ObjectHeader.unpack(make_header(1, 0, len(outgoing.pickled), outgoing).pack())
    incoming = IncomingObjects(header, outgoing.metadata, iovecs)
    incoming.allocate()
    for index in range(incoming.pending_segments):
        incoming.memory(index)[:] = outgoing.segment(index)
    return incoming


SIZES = [
    [], [0], [5], [0, 0, 1], [DIRECT_BYTES], [7, DIRECT_BYTES, 7], [900_000] * 7, [DIRECT_BYTES - 1] * 3,
    [ALLOCATION_BYTES], [5, ALLOCATION_BYTES - 64, 1], [5, ALLOCATION_BYTES - 63, 1], [7, ALLOCATION_BYTES + 1, 0, 7],
    [20 << 20] * 3,
]  # fmt: skip


@pytest.mark.parametrize("iovecs", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_buffer_is_in_one_segment_aligned_and_in_order(sizes: list[int], iovecs: bool) -> None:
    direct, limit = (ALLOCATION_BYTES, ALLOCATION_BYTES) if iovecs else (DIRECT_BYTES, PACKED_BYTES)
    segments = split_into_segments(sizes, iovecs)
    assert [index for segment in segments for index in range(segment.first, segment.last)] == list(range(len(sizes)))
    for segment in segments:
        members = sizes[segment.first : segment.last]
        ends = [offset + size for offset, size in zip(segment.offsets, members, strict=True)]
        assert all(offset % 64 == 0 for offset in segment.offsets)
        assert all(end <= begin for end, begin in zip(ends, segment.offsets[1:], strict=False))
        assert segment.size == ends[-1]
        assert segment.is_joined == (len(members) > 1)
        assert len(members) == 1 or segment.size <= limit
        assert len(members) == 1 or max(members) < direct


def test_with_iovecs_segments_are_filled() -> None:
    assert [len(segment.offsets) for segment in split_into_segments([DIRECT_BYTES] * 70, iovecs=True)] == [32, 32, 6]


def test_large_arrays_are_sent_from_their_own_memory() -> None:
    large = np.zeros(DIRECT_BYTES, np.uint8)
    outgoing = pickled([{"small": np.ones(3), "large": large}])
    segments = [outgoing.segment(index) for index in range(len(outgoing.segments))]
    assert [np.shares_memory(segment, large) for segment in segments] == [False, True]


def test_arrays_are_received_in_their_own_memory() -> None:
    large = np.arange(DIRECT_BYTES, dtype=np.uint8)
    incoming = move(pickled([large]))
    received = incoming.unpickle(0, True)
    assert np.shares_memory(received, incoming.memory(1)) and (received == large).all()


def test_iovecs_are_the_memory_of_arrays() -> None:
    arrays = [np.full(1000 + index, index, np.uint8) for index in range(5)]
    outgoing = pickled([arrays], iovecs=True)
    assert len(outgoing.segments) == 1
    gathered = outgoing.iovecs(0)
    assert all(np.shares_memory(array, buffer) for array, buffer in zip(arrays, gathered.buffers[1:], strict=True))
    assert gathered.nbytes == outgoing.payload_size
    assert all(
        (left == right).all() for left, right in zip(arrays, move(outgoing, True).unpickle(0, True), strict=True)
    )


def test_many_objects_are_unpickled_one_by_one() -> None:
    values = [[index, np.full(index % 7, index)] for index in range(3000)]
    incoming = move(pickled(values))
    assert all((incoming.unpickle(index, True)[1] == value[1]).all() for index, value in enumerate(values))


@pytest.mark.parametrize("count", [0, 1, 5, 2000])
def test_small_objects_are_in_the_header(count: int) -> None:
    outgoing = pickled([list(range(count))])
    header = make_header(1, 0, 1, outgoing)
    assert header.holds_payload == (count < 2000)
    assert move(outgoing).unpickle(0, True) == list(range(count))


SMALL = [[1], [None], ["text", b"bytes"], [(1, 2.5, [True]), {"key": {"nested": "x" * 100}}], [list(range(50))] * 3]


@pytest.mark.parametrize("values", SMALL, ids=str)
def test_native_code_packs_and_reads_small_objects_in_the_same_format(values: list[Any]) -> None:
    made = [pickle_object(value) for value in values]
    header = make_header(3, 1, len(values), OutgoingObjects(made)).pack()
    assert _native.whole_objects([header], 3, 1, len(values)) == [[each.stream for each in made]]
    native = pack_whole_objects(3, 1, made)
    assert native is not None
    read = ObjectHeader.unpack(native)
    incoming = IncomingObjects(read, read.inline[: read.metadata_size])
    incoming.allocate()
    assert [incoming.unpickle(index, True) for index in range(len(values))] == values


@pytest.mark.parametrize("kind, root, count", [(2, 1, 1), (3, 0, 1), (3, 1, 2)])
def test_a_header_of_another_call_holds_no_objects(kind: int, root: int, count: int) -> None:
    header = pack_whole_objects(3, 1, [pickle_object("value")])
    assert header is not None
    assert _native.whole_objects([header], kind, root, count) is None


@pytest.mark.parametrize("value", [np.ones(3), "x" * 2000])
def test_arrays_and_long_objects_are_not_whole(value: Any) -> None:
    assert pack_whole_objects(3, 1, [pickle_object(value)]) is None


def test_an_object_may_pickle_others_while_it_is_pickled() -> None:
    class Outer:
        def __reduce__(self) -> Any:
            return bytes, (pickle_object([1, 2]).stream,)

    assert unpickle_object(pickle_object(["before", Outer(), "after"]).stream, (), False) == [
        "before", pickle_object([1, 2]).stream, "after",
    ]  # fmt: skip


def test_a_reducer_that_is_registered_later_counts() -> None:
    class Late:
        pass

    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle_object(Late())
    copyreg.pickle(Late, lambda _: "late")
    try:
        with pytest.raises(pickle.PicklingError, match="late"):
            pickle_object(Late())
    finally:
        del copyreg.dispatch_table[Late]


def test_memory_is_reused_when_no_array_views_it_any_more() -> None:
    receive_pool._free.clear()
    array = receive_pool.allocate(receive_pool.POOLED_BYTES)
    address = array.ctypes.data
    view = np.ndarray((3,), np.int32, array[64:128].data)
    del array
    assert receive_pool.allocate(receive_pool.POOLED_BYTES).ctypes.data != address
    view[:] = 7
    del view
    assert {len(memory) for memory in receive_pool._free} == {receive_pool.POOLED_BYTES}
    kept = {np.frombuffer(memory, np.uint8).ctypes.data for memory in receive_pool._free}
    assert address in kept
    arrays = [receive_pool.allocate(receive_pool.POOLED_BYTES) for _ in range(2)]
    assert {array.ctypes.data for array in arrays} == kept


def test_memory_of_nearly_the_same_size_is_reused() -> None:
    receive_pool.clear()
    address = receive_pool.allocate(3 * receive_pool.POOLED_BYTES).ctypes.data
    array = receive_pool.allocate(2 * receive_pool.POOLED_BYTES + 1)
    assert (array.size, array.ctypes.data) == (2 * receive_pool.POOLED_BYTES + 1, address)
    del array
    receive_pool.clear()
    assert not receive_pool._free


def test_the_pool_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    receive_pool._free.clear()
    monkeypatch.setattr(receive_pool, "POOL_BYTES", 3 * receive_pool.POOLED_BYTES)
    arrays = [receive_pool.allocate(receive_pool.POOLED_BYTES) for _ in range(5)]
    arrays.clear()
    assert len(receive_pool._free) == 3
    receive_pool._free.clear()


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1])
def test_sizes_beyond_the_address_space_are_refused(size: int) -> None:
    with pytest.raises(MemoryError, match="bytes for objects"):
        receive_pool.allocate(size)


def header_of(metadata: bytes, count: int, payload: int) -> ObjectHeader:
    return ObjectHeader(1, 0, count, None, len(metadata), payload, bytes(len(metadata) + payload))


@pytest.mark.parametrize(
    ("numbers", "count", "payload"),
    [
        ([1], 1, 0),  # too short for its counts
        ([1, 0, 8], 1, 9),  # the sizes do not add up to the payload
        ([2, 0, 8], 1, 8),  # fewer sizes than buffers
        ([0, 0], 1, 0),  # an object without a stream
        ([1, -8, 1, 8], 1, 8),  # a name of a negative length
        ([2, 0, -8, 16], 1, 8),  # a buffer of a negative size
        ([1, 0, 8], 5, 8),  # fewer objects than announced
    ],
)
def test_metadata_that_contradicts_itself_is_refused(numbers: list[int], count: int, payload: int) -> None:
    metadata = array("q", numbers).tobytes()
    with pytest.raises(MalformedObjects):
        IncomingObjects(header_of(metadata, count, payload), metadata)


@pytest.mark.parametrize("came", [0, 1, 7, 9])
def test_a_payload_of_another_size_than_announced_is_refused(came: int) -> None:
    metadata = array("q", [1, 0, 8]).tobytes()
    with pytest.raises(MalformedObjects, match=f"{came} bytes came instead of the 8 announced"):
        IncomingObjects(ObjectHeader(1, 0, 1, None, len(metadata), 8, metadata + bytes(came)), metadata)


@pytest.mark.parametrize("place", [0, 6, 15, 23, 31, 39])
def test_a_header_with_foreign_numbers_is_refused_or_harmless(place: int) -> None:
    raw = bytearray(make_header(1, 0, 1, pickled([1])).pack())
    raw[place] = 0xFF
    assert _native.whole_objects([bytes(raw)], 1, 0, 1) in (None, [[pickle_object(1).stream]])
    try:
        header = ObjectHeader.unpack(bytes(raw))
    except MalformedObjects:
        return
    assert len(header.inline) < 1024


def test_an_error_is_cut_to_the_size_of_the_header() -> None:
    header = ObjectHeader.unpack(ObjectHeader(1, 0, 1, "ä" * 5000).pack())
    assert header.error is not None and header.error.startswith("ää") and len(header.error) < 1024


class Runs:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Runs, "ran", True)


def test_no_code_of_an_object_runs_with_safe() -> None:
    hostile = pickle_object([Runs()])
    with pytest.raises(pickle.UnpicklingError, match="builtins.setattr is neither plain data nor an array"):
        unpickle_object(hostile.stream, hostile.buffers, True)
    assert not Runs.ran


@pytest.mark.parametrize("name", ["O", "i4,O", "S0", "bfloat", "float_"])
def test_a_hostile_dtype_is_refused(name: str) -> None:
    with pytest.raises((pickle.UnpicklingError, TypeError, AttributeError, ValueError)):
        rebuild_dtype(name)


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["Tensor", "compile", "_dynamo", "__name__", "", 5, None, ["float32"], b"float32"], ids=str
)
def test_a_hostile_dtype_of_a_tensor_is_refused(name: Any) -> None:
    pytest.importorskip("torch")

    class Hostile:
        def __reduce__(self) -> Any:
            return rebuild_tensor, (pickle.PickleBuffer(bytearray(8)), name, (2,), False)

    pickled = pickle_object(Hostile())
    with pytest.raises(pickle.UnpicklingError, match="expected the name of a dtype of torch"):
        unpickle_object(pickled.stream, pickled.buffers, True)


class Calls:
    """Travels as a call of a function, and what is done to its result."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.call = (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.call


FLOAT = Calls(rebuild_dtype, "<f8")
MEMORY = pickle.PickleBuffer(bytearray(64))


def test_an_array_larger_than_its_memory_is_refused() -> None:
    pickled = pickle_object(Calls(np.ndarray, (9,), FLOAT, MEMORY))
    with pytest.raises(TypeError, match="buffer is too small"):
        unpickle_object(pickled.stream, pickled.buffers, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ((8,), "O", MEMORY),
        ((8,), object, MEMORY),
        ((8,), FLOAT, None),
        ((8,), FLOAT, MEMORY, 8),
        ((7,), FLOAT, MEMORY, 0, (1 << 40,)),
        ((8,), FLOAT, MEMORY, 0, None, "K"),
        (1 << 40,),
    ],
    ids=["dtype object by name", "dtype object", "no memory", "offset", "strides", "order", "shape alone"],
)
def test_an_array_that_is_made_in_another_way_is_refused(arguments: tuple[Any, ...]) -> None:
    pickled = pickle_object(Calls(np.ndarray, *arguments))
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        unpickle_object(pickled.stream, pickled.buffers, True)


@pytest.mark.parametrize(
    "made",
    [
        Calls(rebuild_dtype, "<S4", state=(3, "|", None, None, None, 1 << 30, 1, 0)),
        Calls(np.ndarray, (8,), FLOAT, MEMORY, state=(1, (1 << 30,), FLOAT, False, b"")),
        Calls(rebuild_dtype, "<f8", state={"name": 1}),
    ],
    ids=["dtype", "array", "attributes"],
)
def test_a_stream_cannot_change_what_is_made(made: Calls) -> None:
    pickled = pickle_object(made)
    with pytest.raises(pickle.UnpicklingError, match="a step that no plain data needs"):
        unpickle_object(pickled.stream, pickled.buffers, True)


@pytest.mark.parametrize("step", [b"cbuiltins\nset\n.", b"I5\n.", b"P1\n.", b"\x82\x01.", b"(i", b"\xff."])
def test_steps_of_other_protocols_are_refused(step: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="a step that no plain data needs"):
        unpickle_object(memoryview(b"\x80\x05" + step), [], True)
