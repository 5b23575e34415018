"""What is announced of objects, how their bytes are cut, and what is refused."""

from __future__ import annotations

import pickle
from array import array
from typing import Any

import numpy as np
import pytest

from procgroup.groups import slabs
from procgroup.groups.envelope import (
    DIRECT_BYTES,
    PACKED_BYTES,
    SLAB_BYTES,
    Arrival,
    Block,
    MalformedEnvelope,
    Parcel,
    announce,
    cut,
)
from procgroup.groups.pickling import pickle_object, rebuild_dtype, rebuild_tensor, unpickle_object


def move(parcel: Parcel, together: bool = False) -> Arrival:
    block = Block.unpack(announce(1, 0, len(parcel.pickled), parcel).pack())
    arrival = Arrival(block, parcel.letter, together)
    arrival.allocate()
    for index in range(arrival.pieces):
        arrival.place(index)[:] = parcel.piece(index)
    return arrival


SIZES = [
    [], [0], [5], [0, 0, 1], [DIRECT_BYTES], [7, DIRECT_BYTES, 7], [900_000] * 7, [DIRECT_BYTES - 1] * 3,
    [SLAB_BYTES], [5, SLAB_BYTES - 64, 1], [5, SLAB_BYTES - 63, 1], [7, SLAB_BYTES + 1, 0, 7], [20 << 20] * 3,
]  # fmt: skip


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_buffer_is_in_one_segment_aligned_and_in_order(sizes: list[int], together: bool) -> None:
    direct, limit = (SLAB_BYTES, SLAB_BYTES) if together else (DIRECT_BYTES, PACKED_BYTES)
    segments = cut(sizes, together)
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


def test_what_is_cut_together_fills_segments() -> None:
    assert [len(segment.offsets) for segment in cut([DIRECT_BYTES] * 70, together=True)] == [32, 32, 6]


def test_large_arrays_are_sent_from_their_own_memory() -> None:
    large = np.zeros(DIRECT_BYTES, np.uint8)
    parcel = Parcel([{"small": np.ones(3), "large": large}])
    pieces = [parcel.piece(index) for index in range(len(parcel.segments))]
    assert [np.shares_memory(piece, large) for piece in pieces] == [False, True]


def test_arrays_are_received_in_their_own_memory() -> None:
    large = np.arange(DIRECT_BYTES, dtype=np.uint8)
    arrival = move(Parcel([large]))
    received = arrival.item(0, True)
    assert np.shares_memory(received, arrival.place(1)) and (received == large).all()


def test_parts_are_the_memory_of_arrays() -> None:
    arrays = [np.full(1000 + index, index, np.uint8) for index in range(5)]
    parcel = Parcel([arrays], together=True)
    assert len(parcel.segments) == 1
    parts = parcel.iovecs(0)
    assert all(np.shares_memory(array, buffer) for array, buffer in zip(arrays, parts.buffers[1:], strict=True))
    assert parts.nbytes == parcel.payload_size
    assert all((left == right).all() for left, right in zip(arrays, move(parcel, True).item(0, True), strict=True))


def test_many_objects_are_put_together_one_by_one() -> None:
    values = [[index, np.full(index % 7, index)] for index in range(3000)]
    arrival = move(Parcel(values))
    assert all((arrival.item(index, True)[1] == value[1]).all() for index, value in enumerate(values))


@pytest.mark.parametrize("count", [0, 1, 5, 2000])
def test_what_fits_travels_in_the_block(count: int) -> None:
    parcel = Parcel([list(range(count))])
    block = announce(1, 0, 1, parcel)
    assert block.holds_payload == (count < 2000)
    assert move(parcel).item(0, True) == list(range(count))


def test_room_is_used_again_when_nothing_views_it_any_more() -> None:
    slabs._kept.clear()
    room = slabs.make_room(slabs.LARGE_BYTES)
    address = room.ctypes.data
    view = np.ndarray((3,), np.int32, room[64:128].data)
    del room
    assert slabs.make_room(slabs.LARGE_BYTES).ctypes.data != address
    view[:] = 7
    del view
    assert {len(memory) for memory in slabs._kept} == {slabs.LARGE_BYTES}
    kept = {np.frombuffer(memory, np.uint8).ctypes.data for memory in slabs._kept}
    assert address in kept
    rooms = [slabs.make_room(slabs.LARGE_BYTES) for _ in range(2)]
    assert {room.ctypes.data for room in rooms} == kept


def test_room_of_nearly_the_same_size_is_used_again() -> None:
    slabs.let_go()
    address = slabs.make_room(3 * slabs.LARGE_BYTES).ctypes.data
    room = slabs.make_room(2 * slabs.LARGE_BYTES + 1)
    assert (room.size, room.ctypes.data) == (2 * slabs.LARGE_BYTES + 1, address)
    del room
    slabs.let_go()
    assert not slabs._kept


def test_no_more_room_is_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs._kept.clear()
    monkeypatch.setattr(slabs, "KEPT_BYTES", 3 * slabs.LARGE_BYTES)
    rooms = [slabs.make_room(slabs.LARGE_BYTES) for _ in range(5)]
    rooms.clear()
    assert len(slabs._kept) == 3
    slabs._kept.clear()


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1])
def test_room_for_what_no_memory_holds_is_refused(size: int) -> None:
    with pytest.raises(MemoryError, match="bytes for objects"):
        slabs.make_room(size)


def block_of(letter: bytes, count: int, payload: int) -> Block:
    return Block(1, 0, count, None, len(letter), payload, bytes(len(letter) + payload))


@pytest.mark.parametrize(
    ("numbers", "count", "payload"),
    [
        ([1], 1, 0),  # too short for what it tells of
        ([1, 0, 8], 1, 9),  # the sizes do not add up to the payload
        ([2, 0, 8], 1, 8),  # fewer sizes than buffers
        ([0, 0], 1, 0),  # an object without a stream
        ([1, -8, 1, 8], 1, 8),  # a name of less than nothing
        ([2, 0, -8, 16], 1, 8),  # a buffer of less than nothing
        ([1, 0, 8], 5, 8),  # fewer objects than announced
    ],
)
def test_a_letter_that_contradicts_itself_is_refused(numbers: list[int], count: int, payload: int) -> None:
    letter = array("q", numbers).tobytes()
    with pytest.raises(MalformedEnvelope):
        Arrival(block_of(letter, count, payload), letter)


@pytest.mark.parametrize("came", [0, 1, 7, 9])
def test_a_payload_of_another_size_than_announced_is_refused(came: int) -> None:
    letter = array("q", [1, 0, 8]).tobytes()
    with pytest.raises(MalformedEnvelope, match=f"{came} bytes came instead of the 8 announced"):
        Arrival(Block(1, 0, 1, None, len(letter), 8, letter + bytes(came)), letter)


@pytest.mark.parametrize("place", [0, 6, 15, 23, 31, 39])
def test_a_block_with_foreign_numbers_is_refused_or_harmless(place: int) -> None:
    raw = announce(1, 0, 1, Parcel([1])).pack().copy()
    raw[place] = 0xFF
    try:
        block = Block.unpack(raw)
    except MalformedEnvelope:
        return
    assert len(block.inline) < 1024


def test_an_error_is_told_as_far_as_it_fits() -> None:
    block = Block.unpack(Block(1, 0, 1, "ä" * 5000).pack())
    assert block.error is not None and block.error.startswith("ää") and len(block.error) < 1024


class Runs:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Runs, "ran", True)


def test_no_code_of_an_object_runs_with_safe() -> None:
    pickled = pickle_object([Runs()])
    with pytest.raises(pickle.UnpicklingError, match="builtins.setattr is neither plain data nor an array"):
        unpickle_object(pickled.stream, pickled.buffers, True)
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
