"""Object operations of a group: each returns the objects that this rank receives.

Small objects are part of the header. Larger ones follow in segments: through the group's own collectives where every
rank receives them, in messages where one rank does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from procgroup.errors import CollectiveMismatch
from procgroup.groups.group import ProcessGroup
from procgroup.groups.object_call import Kind, ObjectCall
from procgroup.groups.object_format import HEADER_BYTES, Bytes, Header, IncomingObjects, OutgoingObjects

# Tags of this module, far from those of programs: of the messages of collectives, and of send_object_list.
_COLLECTIVE_TAG = (1 << 63) - 3
_MESSAGE_TAG = (1 << 63) - 2


def all_gather(group: ProcessGroup, value: Any, seconds: float, safe: bool) -> list[Any]:
    """Return the objects of all ranks, in group order; this rank's own object is a copy, too."""
    call = ObjectCall(group, Kind.ALL_GATHER, -1, seconds, safe)
    outgoing = call.pickle(lambda: OutgoingObjects([value], call.iovecs))
    headers = call.agree(call.header(outgoing, 1))
    metadata = _gather_metadata(call, headers, outgoing)
    incoming = [call.incoming(rank, header, metadata[rank]) for rank, header in enumerate(headers)]
    call.allocate(headers, incoming)
    for index in range(max(each.pending_segments for each in incoming)):
        _gather_segment(call, [each.memory(index) for each in incoming], outgoing, index)
    return [call.unpickle(rank, each)[0] for rank, each in enumerate(incoming)]


def broadcast(group: ProcessGroup, objects: Sequence[Any], root: int, seconds: float, safe: bool) -> Sequence[Any]:
    """Return the objects of ``root``; on the root, ``objects`` itself. Elsewhere only its length is used."""
    call = ObjectCall(group, Kind.BROADCAST, root, seconds, safe)
    outgoing = call.pickle(lambda: OutgoingObjects(objects, call.iovecs)) if group.rank() == root else None
    headers = call.agree(call.header(outgoing, len(objects)))
    header = headers[root]
    metadata = header.inline[: header.metadata_size]
    if not header.holds_metadata:
        raw = np.frombuffer(outgoing.metadata, np.uint8) if outgoing else np.empty(header.metadata_size, np.uint8)
        group.broadcast(raw, root, timeout=call.left)
        metadata = raw.tobytes()
    incoming = call.incoming(root, header, metadata)
    call.allocate(headers, [] if outgoing else [incoming])
    for index in range(incoming.pending_segments):
        if outgoing and outgoing.segments[index].is_joined and call.iovecs:
            group.broadcast_iovecs(outgoing.iovecs(index), call.left)
        else:
            group.broadcast(outgoing.segment(index) if outgoing else incoming.memory(index), root, timeout=call.left)
    return objects if outgoing else call.unpickle(root, incoming)


def gather(group: ProcessGroup, value: Any, root: int, seconds: float, safe: bool) -> list[Any] | None:
    """Return the objects of all ranks on ``root``, None elsewhere."""
    call = ObjectCall(group, Kind.GATHER, root, seconds, safe)
    outgoing = call.pickle(lambda: OutgoingObjects([value]))
    headers = call.agree(call.header(outgoing, 1))
    if group.rank() != root:
        _send_metadata(call, outgoing, headers[group.rank()], root, _COLLECTIVE_TAG)
        call.allocate(headers, [])
        _send_segments(call, outgoing, headers[group.rank()], root, _COLLECTIVE_TAG)
        return None
    incoming = []
    for rank, header in enumerate(headers):
        metadata = outgoing.metadata if rank == root else _recv_metadata(call, header, rank, _COLLECTIVE_TAG)
        incoming.append(call.incoming(rank, header, metadata))
    call.allocate(headers, incoming)
    for rank, each in enumerate(incoming):
        if rank == root:
            _copy(outgoing, each)
        else:
            _recv_segments(call, each, rank, _COLLECTIVE_TAG)
    return [call.unpickle(rank, each)[0] for rank, each in enumerate(incoming)]


def scatter(group: ProcessGroup, objects: Sequence[Any] | None, root: int, seconds: float, safe: bool) -> Any:
    """Return the object that ``root`` has for this rank; ``objects`` is used on the root only."""
    call = ObjectCall(group, Kind.SCATTER, root, seconds, safe)
    if group.rank() == root:
        return _scatter_from_root(call, objects or ())
    headers = call.agree(call.header(None, 1))
    raw = np.empty(HEADER_BYTES, np.uint8)
    group.recv(raw, root, _COLLECTIVE_TAG, call.left)
    header = call.read_header(root, raw)
    incoming = call.incoming(root, header, _recv_metadata(call, header, root, _COLLECTIVE_TAG))
    call.allocate(headers, [incoming])
    _recv_segments(call, incoming, root, _COLLECTIVE_TAG)
    return call.unpickle(root, incoming)[0]


def send(group: ProcessGroup, objects: Sequence[Any], destination: int, seconds: float) -> None:
    """Send objects to one rank."""
    call = ObjectCall(group, Kind.SEND, destination, seconds, False)

    def send_header(header: Header) -> None:
        group.send(header.pack(), destination, _MESSAGE_TAG, timeout=call.left)

    outgoing = call.pickle(lambda: OutgoingObjects(objects), send_header)
    header = call.header(outgoing, len(objects))
    send_header(header)
    _send_metadata(call, outgoing, header, destination, _MESSAGE_TAG)
    _send_segments(call, outgoing, header, destination, _MESSAGE_TAG)


def recv(group: ProcessGroup, count: int, source: int | None, seconds: float, safe: bool) -> tuple[list[Any], int]:
    """Receive ``count`` objects from ``source``, or from any rank with None; return them and the sender's group rank.

    Raises CollectiveMismatch, after all have been received, when the sender sent more or fewer.
    """
    call = ObjectCall(group, Kind.RECV, -1 if source is None else source, seconds, safe)
    raw = np.empty(HEADER_BYTES, np.uint8)
    source = group.recv(raw, source, _MESSAGE_TAG, call.left)
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


def _scatter_from_root(call: ObjectCall, objects: Sequence[Any]) -> Any:
    group, root = call.group, call.root
    outgoing = call.pickle(lambda: [OutgoingObjects([value]) for value in objects])
    headers = [call.header(each, 1) for each in outgoing]
    total = Header(call.kind, root, 1, payload_size=sum(header.payload_size for header in headers))
    announced = call.agree(total)
    others = [rank for rank in range(group.size()) if rank != root]
    for rank in others:
        group.send(headers[rank].pack(), rank, _COLLECTIVE_TAG, timeout=call.left)
        _send_metadata(call, outgoing[rank], headers[rank], rank, _COLLECTIVE_TAG)
    own = call.incoming(root, headers[root], outgoing[root].metadata)
    call.allocate(announced, [own])
    for rank in others:
        _send_segments(call, outgoing[rank], headers[rank], rank, _COLLECTIVE_TAG)
    _copy(outgoing[root], own)
    return call.unpickle(root, own)[0]


def _gather_metadata(call: ObjectCall, headers: Sequence[Header], outgoing: OutgoingObjects) -> list[bytes]:
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


def _send_metadata(call: ObjectCall, outgoing: OutgoingObjects, header: Header, destination: int, tag: int) -> None:
    if not header.holds_metadata:
        call.group.send(np.frombuffer(outgoing.metadata, np.uint8), destination, tag, timeout=call.left)


def _send_segments(call: ObjectCall, outgoing: OutgoingObjects, header: Header, destination: int, tag: int) -> None:
    if not header.holds_payload:
        for index in range(len(outgoing.segments)):
            call.group.send(outgoing.segment(index), destination, tag, timeout=call.left)


def _recv_metadata(call: ObjectCall, header: Header, source: int, tag: int) -> bytes:
    if header.holds_metadata:
        return header.inline[: header.metadata_size]
    metadata = np.empty(header.metadata_size, np.uint8)
    call.group.recv(metadata, source, tag, call.left)
    return metadata.tobytes()


def _recv_segments(call: ObjectCall, incoming: IncomingObjects, source: int, tag: int) -> None:
    for index in range(incoming.pending_segments):
        call.group.recv(incoming.memory(index), source, tag, call.left)
