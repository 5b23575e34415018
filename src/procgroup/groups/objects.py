"""The calls that move objects, on a group: each returns the objects that this rank receives.

Small objects travel inside of what is announced. Larger ones follow in segments: through the group's own
collectives where every rank gets them, in messages where one rank does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from procgroup.errors import CollectiveMismatch
from procgroup.groups.envelope import BLOCK_BYTES, Arrival, Block, Bytes, Parcel
from procgroup.groups.group import ProcessGroup
from procgroup.groups.object_call import Kind, ObjectCall

# Tags of our own, far from what programs use: of what collectives send, and of send_object_list.
_COLLECTIVE_TAG = (1 << 63) - 3
_MESSAGE_TAG = (1 << 63) - 2


def all_gather(group: ProcessGroup, value: Any, seconds: float, safe: bool) -> list[Any]:
    """Return the objects of all ranks, in group order; this rank's too is a copy."""
    call = ObjectCall(group, Kind.ALL_GATHER, -1, seconds, safe)
    parcel = call.pack(lambda: Parcel([value], call.together))
    blocks = call.meet(call.announce(parcel, 1))
    letters = _gather_letters(call, blocks, parcel)
    arrivals = [call.expect(rank, block, letters[rank]) for rank, block in enumerate(blocks)]
    call.make_room(blocks, arrivals)
    for index in range(max(arrival.pieces for arrival in arrivals)):
        _gather_segment(call, [arrival.place(index) for arrival in arrivals], parcel, index)
    return [call.open(rank, arrival)[0] for rank, arrival in enumerate(arrivals)]


def broadcast(group: ProcessGroup, objects: Sequence[Any], root: int, seconds: float, safe: bool) -> Sequence[Any]:
    """Return the objects of ``root``; there, those that were given. Elsewhere only how many are given counts."""
    call = ObjectCall(group, Kind.BROADCAST, root, seconds, safe)
    parcel = call.pack(lambda: Parcel(objects, call.together)) if group.rank() == root else None
    blocks = call.meet(call.announce(parcel, len(objects)))
    block = blocks[root]
    letter = block.inline[: block.letter_size]
    if not block.holds_letter:
        raw = np.frombuffer(parcel.letter, np.uint8) if parcel else np.empty(block.letter_size, np.uint8)
        group.broadcast(raw, root, timeout=call.left)
        letter = raw.tobytes()
    arrival = call.expect(root, block, letter)
    call.make_room(blocks, [] if parcel else [arrival])
    for index in range(arrival.pieces):
        if parcel and parcel.segments[index].is_joined and call.together:
            group.broadcast_iovecs(parcel.iovecs(index), call.left)
        else:
            group.broadcast(parcel.piece(index) if parcel else arrival.place(index), root, timeout=call.left)
    return objects if parcel else call.open(root, arrival)


def gather(group: ProcessGroup, value: Any, root: int, seconds: float, safe: bool) -> list[Any] | None:
    """Return the objects of all ranks on ``root``, None elsewhere."""
    call = ObjectCall(group, Kind.GATHER, root, seconds, safe)
    parcel = call.pack(lambda: Parcel([value]))
    blocks = call.meet(call.announce(parcel, 1))
    if group.rank() != root:
        _send_letter(call, parcel, blocks[group.rank()], root, _COLLECTIVE_TAG)
        call.make_room(blocks, [])
        _send_pieces(call, parcel, blocks[group.rank()], root, _COLLECTIVE_TAG)
        return None
    arrivals = []
    for rank, block in enumerate(blocks):
        letter = parcel.letter if rank == root else _recv_letter(call, block, rank, _COLLECTIVE_TAG)
        arrivals.append(call.expect(rank, block, letter))
    call.make_room(blocks, arrivals)
    for rank, arrival in enumerate(arrivals):
        if rank == root:
            _copy(parcel, arrival)
        else:
            _recv_pieces(call, arrival, rank, _COLLECTIVE_TAG)
    return [call.open(rank, arrival)[0] for rank, arrival in enumerate(arrivals)]


def scatter(group: ProcessGroup, objects: Sequence[Any] | None, root: int, seconds: float, safe: bool) -> Any:
    """Return the object of ``root`` that is meant for this rank; ``objects`` counts there only."""
    call = ObjectCall(group, Kind.SCATTER, root, seconds, safe)
    if group.rank() == root:
        return _scatter_out(call, objects or ())
    blocks = call.meet(call.announce(None, 1))
    raw = np.empty(BLOCK_BYTES, np.uint8)
    group.recv(raw, root, _COLLECTIVE_TAG, call.left)
    block = call.read(root, raw)
    arrival = call.expect(root, block, _recv_letter(call, block, root, _COLLECTIVE_TAG))
    call.make_room(blocks, [arrival])
    _recv_pieces(call, arrival, root, _COLLECTIVE_TAG)
    return call.open(root, arrival)[0]


def send(group: ProcessGroup, objects: Sequence[Any], destination: int, seconds: float) -> None:
    """Send objects to one rank."""
    call = ObjectCall(group, Kind.SEND, destination, seconds, False)

    def send_block(block: Block) -> None:
        group.send(block.pack(), destination, _MESSAGE_TAG, timeout=call.left)

    parcel = call.pack(lambda: Parcel(objects), send_block)
    block = call.announce(parcel, len(objects))
    send_block(block)
    _send_letter(call, parcel, block, destination, _MESSAGE_TAG)
    _send_pieces(call, parcel, block, destination, _MESSAGE_TAG)


def recv(group: ProcessGroup, count: int, source: int | None, seconds: float, safe: bool) -> tuple[list[Any], int]:
    """Receive ``count`` objects from one rank, or from any with None; return them and who sent them.

    Raises CollectiveMismatch, after having taken them, when there are more or fewer.
    """
    call = ObjectCall(group, Kind.RECV, -1 if source is None else source, seconds, safe)
    raw = np.empty(BLOCK_BYTES, np.uint8)
    source = group.recv(raw, source, _MESSAGE_TAG, call.left)
    block = call.read(source, raw)
    call.require_pickled(source, block)
    arrival = call.expect(source, block, _recv_letter(call, block, source, _MESSAGE_TAG))
    arrival.allocate()
    _recv_pieces(call, arrival, source, _MESSAGE_TAG)
    if block.count != count:
        calls = {source: f"send_object_list({block.count} objects)", group.rank(): f"recv_object_list({count} objects)"}
        raise CollectiveMismatch(calls=calls, sequence=0, **call.where())
    return call.open(source, arrival), source


def _scatter_out(call: ObjectCall, objects: Sequence[Any]) -> Any:
    group, root = call.group, call.root
    parcels = call.pack(lambda: [Parcel([value]) for value in objects])
    blocks = [call.announce(parcel, 1) for parcel in parcels]
    total = Block(call.kind, root, 1, payload_size=sum(block.payload_size for block in blocks))
    announced = call.meet(total)
    others = [rank for rank in range(group.size()) if rank != root]
    for rank in others:
        group.send(blocks[rank].pack(), rank, _COLLECTIVE_TAG, timeout=call.left)
        _send_letter(call, parcels[rank], blocks[rank], rank, _COLLECTIVE_TAG)
    own = call.expect(root, blocks[root], parcels[root].letter)
    call.make_room(announced, [own])
    for rank in others:
        _send_pieces(call, parcels[rank], blocks[rank], rank, _COLLECTIVE_TAG)
    _copy(parcels[root], own)
    return call.open(root, own)[0]


def _gather_letters(call: ObjectCall, blocks: Sequence[Block], parcel: Parcel) -> list[bytes]:
    """Return the letters of all ranks: from the blocks, or in a call of their own when one of them is longer."""
    if all(block.holds_letter for block in blocks):
        return [block.inline[: block.letter_size] for block in blocks]
    letters = [np.empty(block.letter_size, np.uint8) for block in blocks]
    _gather_pieces(call, letters, np.frombuffer(parcel.letter, np.uint8))
    return [letter.tobytes() for letter in letters]


def _gather_segment(call: ObjectCall, places: Sequence[Bytes], parcel: Parcel, index: int) -> None:
    moves = places[call.group.rank()].size > 0
    if call.together and moves and parcel.segments[index].is_joined:
        call.group.all_gather_iovecs(places, parcel.iovecs(index), call.left)
    else:
        _gather_pieces(call, places, parcel.piece(index))


def _gather_pieces(call: ObjectCall, places: Sequence[Bytes], mine: Bytes) -> None:
    own = places[call.group.rank()].size  # nothing, when the block held it
    call.group.all_gather(places, mine[:own], timeout=call.left)


def _copy(parcel: Parcel, arrival: Arrival) -> None:
    for index in range(arrival.pieces):
        arrival.place(index)[:] = parcel.piece(index)


def _send_letter(call: ObjectCall, parcel: Parcel, block: Block, destination: int, tag: int) -> None:
    if not block.holds_letter:
        call.group.send(np.frombuffer(parcel.letter, np.uint8), destination, tag, timeout=call.left)


def _send_pieces(call: ObjectCall, parcel: Parcel, block: Block, destination: int, tag: int) -> None:
    if not block.holds_payload:
        for index in range(len(parcel.segments)):
            call.group.send(parcel.piece(index), destination, tag, timeout=call.left)


def _recv_letter(call: ObjectCall, block: Block, source: int, tag: int) -> bytes:
    if block.holds_letter:
        return block.inline[: block.letter_size]
    letter = np.empty(block.letter_size, np.uint8)
    call.group.recv(letter, source, tag, call.left)
    return letter.tobytes()


def _recv_pieces(call: ObjectCall, arrival: Arrival, source: int, tag: int) -> None:
    for index in range(arrival.pieces):
        call.group.recv(arrival.place(index), source, tag, call.left)
