"""Object operations of a group: each returns the objects that this rank receives.

Small objects are part of the header. Larger ones follow in segments: through the group's own collectives where every
rank receives them, in messages where one rank does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from procgroup.errors import CollectiveMismatch
from procgroup.groups.group import ProcessGroup
from procgroup.groups.object_call import NONE, Kind, ObjectCall
from procgroup.groups.object_format import Bytes, IncomingObjects, ObjectHeader, OutgoingObjects, make_header
from procgroup.groups.pickling import loader
from procgroup.types import Timeout

# Tags of this module, far from those of programs: of the messages of collectives, and of send_object_list.
_COLLECTIVE_TAG = (1 << 63) - 3
_MESSAGE_TAG = (1 << 63) - 2
_SEND = int(Kind.SEND)


def all_gather(group: ProcessGroup, value: Any, timeout: Timeout | None, safe: bool) -> list[Any]:
    """Return the objects of all ranks, in group order; this rank's own object is a copy, too."""
    call = ObjectCall(group, Kind.ALL_GATHER, -1, timeout, safe)
    found = call.exchange((value,), 1)
    if found is not None:
        return [objects[0] for objects in found]
    headers = call.agree()
    outgoing = call.outgoing((value,))
    metadata = _gather_metadata(call, headers, outgoing)
    incoming = [call.incoming(rank, header, metadata[rank]) for rank, header in enumerate(headers)]
    call.allocate(headers, incoming)
    for index in range(max(each.pending_segments for each in incoming)):
        _gather_segment(call, [each.memory(index) for each in incoming], outgoing, index)
    return [call.unpickle(rank, each)[0] for rank, each in enumerate(incoming)]


def broadcast(
    group: ProcessGroup, objects: Sequence[Any], root: int, timeout: Timeout | None, safe: bool
) -> Sequence[Any]:
    """Return the objects of ``root``; on the root, ``objects`` itself. Elsewhere only its length is used."""
    call = ObjectCall(group, Kind.BROADCAST, root, timeout, safe)
    is_root = group.rank() == root
    found = call.exchange(objects, len(objects), NONE) if is_root else call.exchange(None, len(objects))
    if found is not None:
        return objects if is_root else found[root]
    headers = call.agree()
    outgoing = call.outgoing(objects) if is_root else None
    announced = headers[root]
    metadata = announced.inline[: announced.metadata_size]
    if not announced.holds_metadata:
        memory = np.frombuffer(outgoing.metadata, np.uint8) if outgoing else np.empty(announced.metadata_size, np.uint8)
        group.broadcast(memory, root, timeout=call.left)
        metadata = memory.tobytes()
    incoming = call.incoming(root, announced, metadata)
    call.allocate(headers, [] if is_root else [incoming])
    for index in range(incoming.pending_segments):
        if outgoing and outgoing.segments[index].is_joined and call.iovecs:
            group.broadcast_iovecs(outgoing.iovecs(index), call.left)
        else:
            group.broadcast(outgoing.segment(index) if outgoing else incoming.memory(index), root, timeout=call.left)
    return objects if is_root else call.unpickle(root, incoming)


def gather(group: ProcessGroup, value: Any, root: int, timeout: Timeout | None, safe: bool) -> list[Any] | None:
    """Return the objects of all ranks on ``root``, None elsewhere."""
    call = ObjectCall(group, Kind.GATHER, root, timeout, safe)
    is_root = group.rank() == root
    found = call.exchange((value,), 1, None if is_root else NONE)
    if found is not None:
        return [objects[0] for objects in found] if is_root else None
    headers = call.agree()
    outgoing = call.outgoing((value,))
    if not is_root:
        _send_metadata(call, outgoing, headers[group.rank()], root, _COLLECTIVE_TAG)
        call.allocate(headers, [])
        _send_segments(call, outgoing, headers[group.rank()], root, _COLLECTIVE_TAG)
        return None
    incoming = []
    for rank, announced in enumerate(headers):
        metadata = outgoing.metadata if rank == root else _recv_metadata(call, announced, rank, _COLLECTIVE_TAG)
        incoming.append(call.incoming(rank, announced, metadata))
    call.allocate(headers, incoming)
    for rank, each in enumerate(incoming):
        if rank == root:
            _copy(outgoing, each)
        else:
            _recv_segments(call, each, rank, _COLLECTIVE_TAG)
    return [call.unpickle(rank, each)[0] for rank, each in enumerate(incoming)]


def scatter(group: ProcessGroup, objects: Sequence[Any] | None, root: int, timeout: Timeout | None, safe: bool) -> Any:
    """Return the object that ``root`` has for this rank; ``objects`` is used on the root only."""
    call = ObjectCall(group, Kind.SCATTER, root, timeout, safe)
    rank, size = group.rank(), group.size()
    found = call.exchange(objects if rank == root else None, size, rank)
    if found is not None:
        return found[root][0]
    headers = call.agree()
    if rank == root:
        return _scatter_from_root(call, headers, call.outgoing(objects or ()))
    own, _ = call.recv_header(root, _COLLECTIVE_TAG)
    coming = call.read_header(root, own)
    incoming = call.incoming(root, coming, _recv_metadata(call, coming, root, _COLLECTIVE_TAG))
    call.allocate(headers, [incoming])
    _recv_segments(call, incoming, root, _COLLECTIVE_TAG)
    return call.unpickle(root, incoming)[0]


def try_send(group: ProcessGroup, objects: object, global_rank: int | None) -> bool:
    """Send objects if the call is ordinary: small plain objects in a list, for the global rank of another rank."""
    return group.calls.try_send_objects(objects, _SEND, global_rank, _MESSAGE_TAG)


def send(group: ProcessGroup, objects: Sequence[Any], destination: int, timeout: Timeout | None) -> None:
    """Send objects to one rank."""
    if group.takes_iovecs and group.calls.send_objects(objects, _SEND, destination, _MESSAGE_TAG, timeout):
        return
    call = ObjectCall(group, Kind.SEND, destination, timeout, False)
    outgoing = call.send(objects, destination, _MESSAGE_TAG)
    if outgoing is not None:
        header = make_header(Kind.SEND, destination, len(objects), outgoing)
        _send_metadata(call, outgoing, header, destination, _MESSAGE_TAG)
        _send_segments(call, outgoing, header, destination, _MESSAGE_TAG)


def recv(
    group: ProcessGroup, count: int, source: int | None, timeout: Timeout | None, safe: bool
) -> tuple[list[Any], int]:
    """Receive ``count`` objects from ``source``, or from any rank with None; return them and the sender's group rank.

    Raises CollectiveMismatch, after all have been received, when the sender sent more or fewer.
    """
    started = time.monotonic()
    if group.takes_iovecs:
        loads = loader(safe)
        given = -1 if source is None else source
        raw, sender, made, failed = group.calls.recv_objects(_SEND, count, given, _MESSAGE_TAG, loads, timeout)
        if made is not None:
            return made, sender
        call = ObjectCall(group, Kind.RECV, given, timeout, safe, started)
        if failed is not None:
            raise call.unpickling_failed(*failed, raw) from failed[2]
    else:
        call = ObjectCall(group, Kind.RECV, -1 if source is None else source, timeout, safe, started)
        raw, sender = call.recv_header(source, _MESSAGE_TAG)
    source = sender
    header = call.read_header(source, raw)
    call.require_pickled(source, header)
    incoming = call.incoming(source, header, _recv_metadata(call, header, source, _MESSAGE_TAG))
    incoming.allocate()
    _recv_segments(call, incoming, source, _MESSAGE_TAG)
    if header.count != count:
        calls = {
            source: f"send_object_list({header.count} objects)",
            group.rank(): f"recv_object_list({count} objects)",
        }
        raise CollectiveMismatch(calls=calls, sequence=0, **call.error_data())
    return call.unpickle(source, incoming), source


def _scatter_from_root(call: ObjectCall, announced: Sequence[ObjectHeader], pickled: OutgoingObjects) -> Any:
    group, root = call.group, call.root
    outgoing = [OutgoingObjects([each]) for each in pickled.pickled]
    headers = [make_header(call.kind, root, 1, each) for each in outgoing]
    others = [rank for rank in range(group.size()) if rank != root]
    for rank in others:
        call.send_header(headers[rank].pack(), rank, _COLLECTIVE_TAG)
        _send_metadata(call, outgoing[rank], headers[rank], rank, _COLLECTIVE_TAG)
    own = call.incoming(root, headers[root], outgoing[root].metadata)
    call.allocate(announced, [own])
    for rank in others:
        _send_segments(call, outgoing[rank], headers[rank], rank, _COLLECTIVE_TAG)
    _copy(outgoing[root], own)
    return call.unpickle(root, own)[0]


def _gather_metadata(call: ObjectCall, headers: Sequence[ObjectHeader], outgoing: OutgoingObjects) -> list[bytes]:
    """Return the metadata of all ranks: from the headers, or by one more call when some rank's is longer."""
    if all(header.holds_metadata for header in headers):
        return [header.inline[: header.metadata_size] for header in headers]
    outputs = [np.empty(header.metadata_size, np.uint8) for header in headers]
    _gather_bytes(call, outputs, np.frombuffer(outgoing.metadata, np.uint8))
    return [output.tobytes() for output in outputs]


def _gather_segment(call: ObjectCall, outputs: Sequence[Bytes], outgoing: OutgoingObjects, index: int) -> None:
    has_own = outputs[call.group.rank()].size > 0
    if call.iovecs and has_own and outgoing.segments[index].is_joined:
        call.group.all_gather_iovecs(outputs, outgoing.iovecs(index), call.left)
    else:
        _gather_bytes(call, outputs, outgoing.segment(index))


def _gather_bytes(call: ObjectCall, outputs: Sequence[Bytes], mine: Bytes) -> None:
    own = outputs[call.group.rank()].size  # 0 when the header holds the payload
    call.group.all_gather(outputs, mine[:own], timeout=call.left)


def _copy(outgoing: OutgoingObjects, incoming: IncomingObjects) -> None:
    for index in range(incoming.pending_segments):
        incoming.memory(index)[:] = outgoing.segment(index)


def _send_metadata(
    call: ObjectCall, outgoing: OutgoingObjects, header: ObjectHeader, destination: int, tag: int
) -> None:
    if not header.holds_metadata:
        call.group.send(np.frombuffer(outgoing.metadata, np.uint8), destination, tag, timeout=call.left)


def _send_segments(
    call: ObjectCall, outgoing: OutgoingObjects, header: ObjectHeader, destination: int, tag: int
) -> None:
    if not header.holds_payload:
        for index in range(len(outgoing.segments)):
            call.group.send(outgoing.segment(index), destination, tag, timeout=call.left)


def _recv_metadata(call: ObjectCall, header: ObjectHeader, source: int, tag: int) -> bytes:
    if header.holds_metadata:
        return header.inline[: header.metadata_size]
    metadata = np.empty(header.metadata_size, np.uint8)
    call.group.recv(metadata, source, tag, call.left)
    return metadata.tobytes()


def _recv_segments(call: ObjectCall, incoming: IncomingObjects, source: int, tag: int) -> None:
    for index in range(incoming.pending_segments):
        call.group.recv(incoming.memory(index), source, tag, call.left)
