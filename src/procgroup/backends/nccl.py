"""The backend "nccl": NCCL moves arrays in the memory of GPUs.

The engine agrees on each call; then NCCL's work is queued on a stream of the communicator, behind what the caller has
queued before the call, and the call ends. The group follows the work to its end::

    caller's stream     kernels (ready)                           let_streams_wait: waits for (done)  kernels
    engine                  agree                                 follows the work until (done)
    stream of NCCL                waits for (ready)  NCCL (done)

The collectives of a group have one communicator, and the messages from one rank to another have one of their own, which
both ranks use in the order in which the receiver matches messages: so no message waits for a collective, nor for a
message in the other direction.

A *communicator* is made with device_id when the group is made, otherwise when the first call needs it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

from procgroup.arrays import cuda_array
from procgroup.arrays.array_view import numpy_dtype
from procgroup.arrays.making import itemsize_of
from procgroup.backends import cuda
from procgroup.backends.nccl_communicator import Communicator, bindings, load
from procgroup.errors import ArgumentError, DistBackendError
from procgroup.groups.backend import Awaited, DeviceCall, DeviceWork, Span
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.store import Store

OPERATIONS = frozenset(
    ("broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all")
    + ("send", "recv")
)
_BYTES = 1
"""NCCL's number for uint8: what is only moved is moved as bytes, whatever its type."""
_DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
_OPS = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
_PARTS = {"complex64": "float32", "complex128": "float64"}
"""The real numbers of which complex ones consist: sums and means are theirs."""
_BOOL_OPS = {"MIN": "MIN", "MAX": "MAX", "SUM": "MAX", "PRODUCT": "MIN"}
"""The operations on bool by those on uint8 that have the same results."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_PAUSE_SECONDS = 0.00005
_HOST_VALUE = 1
"""The factor of an operation is in the host's memory, and is read at once: ncclScalarHostImmediate."""


@cache
def supports(op: str, dtype: str, reduce_op: str) -> bool:
    """Return whether NCCL makes a call on these arrays."""
    return op in OPERATIONS and (not reduce_op or _reduction(reduce_op, dtype) is not None)


class NcclBackend:
    """The communicators of one group."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        device: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._options = options or {}
        self._device = device
        self._is_eager = device is not None
        self._collectives: _Queue | None = None
        self._messages: dict[tuple[int, int], _Queue] = {}
        self._has_failed = False

    def supports(self, op: str, dtype: str, reduce_op: str) -> bool:
        # NCCL leaves out the last elements of what it scales in a group of one rank (2.28.9, as under PyTorch).
        is_scaled_alone = self._size == 1 and reduce_op == "PREMUL_SUM"
        return supports(op, dtype, reduce_op) and not is_scaled_alone

    def begin(self, call: DeviceCall) -> list[Any]:
        """Record an event on each stream on which the arrays of the call are used; return the events.

        Raises ArgumentError for arrays on another GPU than earlier ones.
        """
        if self._device is None:
            load()
            self._device = call.device
        if self._device != call.device:
            raise ArgumentError(
                f"{call.op}: the arrays are on GPU {call.device}, but this group uses GPU {self._device} on this rank, "
                f"{'as device_id says' if self._is_eager else 'as in its first call'}. Move them there."
            )
        gpu = cuda.gpu(call.device)
        with gpu.current():
            return [gpu.record(stream) for stream in cuda_array.current_streams(call.arrays)]

    def move(self, call: DeviceCall, begun: list[Any]) -> Generator[Awaited, None, DeviceWork | None]:
        """Queue NCCL's work, when the communicator is there."""
        if self._size == 1 and call.reduce_op == "AVG":
            call = call._replace(reduce_op="SUM")  # the same for one rank, and not scaled: see supports()
        queue = yield from self._queue_of(call)
        has_bytes = any(nbytes for _, nbytes in call.inputs + call.outputs)
        work = (yield from queue.launch(call, begun, self._rank)) if has_bytes else None
        queue.next_message += 1
        return work

    def end_work(self) -> None:
        self._has_failed = True
        for queue in self._queues():
            queue.communicator.abort()

    def close(self, failed: bool) -> None:
        for queue in self._queues():
            queue.communicator.close(failed or self._has_failed)

    def _queues(self) -> list[_Queue]:
        return [queue for queue in (self._collectives, *self._messages.values()) if queue is not None]

    def _make_queue(self, rank: int, size: int) -> _Queue:
        assert self._device is not None, "begin has set it"
        if self._has_failed:
            raise DistBackendError("the group has failed")
        return _Queue(Communicator(cuda.gpu(self._device), rank, size, self._options))

    def _queue_of(self, call: DeviceCall) -> Generator[Awaited, None, _Queue]:
        """Return the queue of a call, connected; and, of messages, when the turn of the call has come."""
        if call.op not in ("send", "recv"):
            if self._collectives is None:
                self._collectives = self._make_queue(self._rank, self._size)
                yield from self._collectives.communicator.connect(PrefixStore("all", self._store))
            return self._collectives
        pair = (self._rank, call.root) if call.op == "send" else (call.root, self._rank)
        if call.number == 0:
            self._messages[pair] = self._make_queue(pair.index(self._rank), 2)
            yield from self._messages[pair].communicator.connect(PrefixStore(f"{pair[0]}-{pair[1]}", self._store))
        while pair not in self._messages or self._messages[pair].next_message != call.number:
            yield call.root
        return self._messages[pair]


class EagerNcclBackend(NcclBackend):
    """The same on a GPU that is known before the first call: its communicator is made together with the group."""

    def open(self) -> Iterator[Awaited]:
        """Make the communicator of collectives."""
        load()
        self._collectives = self._make_queue(self._rank, self._size)
        yield from self._collectives.communicator.connect(PrefixStore("all", self._store))


class _Queue:
    """A communicator whose calls start one after the other."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator: Communicator = communicator
        self.next_message: int = 0
        self.running: set[_Work] = set()
        """Work whose arrays must not go before it has ended, whatever becomes of its call."""

    def launch(self, call: DeviceCall, begun: list[Any], rank: int) -> Generator[Awaited, None, DeviceWork]:
        """Queue a call behind the events ``begun``; return its work when NCCL has queued it."""
        communicator = self.communicator
        gpu, stream = communicator.gpu, communicator.stream
        with gpu.current():
            for event in begun:
                cuda.let_wait(stream, event)
                gpu.give_back(event)
        with _in_one_piece(call, gpu, stream) as (moved, finish):
            with gpu.current(), communicator.errors():
                _enqueue(_steps(moved, rank), call, communicator.handle, stream)
            yield from communicator.settle()
            with gpu.current():
                finish()
        with gpu.current():
            work = _Work(self, gpu.record(stream), call.arrays)
        self.running.add(work)
        return work


@contextmanager
def _in_one_piece(call: DeviceCall, gpu: cuda.Gpu, stream: int) -> Iterator[tuple[DeviceCall, Callable[[], None]]]:
    """Give a call its blocks in one piece, where NCCL has an operation for that.

    Which of NCCL's operations moves the blocks must not depend on where they are, which may differ between ranks:
    it depends on their sizes, on which all ranks agree. So blocks of one size that are scattered are copied into one
    piece before the call, or out of it by the function that is given beside the call, to be called after it.
    """
    blocks = {"all_gather": call.outputs, "reduce_scatter": call.inputs}.get(call.op, [])
    if not _are_equal(blocks) or _are_one_piece(blocks):
        yield call, lambda: None
        return
    nbytes = blocks[0][1]
    with gpu.current():
        whole = gpu.allocate(stream, nbytes * len(blocks))
    pieces = [(whole + place * nbytes, nbytes) for place in range(len(blocks))]
    try:
        if call.op == "all_gather":
            yield call._replace(outputs=pieces), lambda: _copy(stream, pieces, blocks)
        else:
            with gpu.current():
                _copy(stream, blocks, pieces)
            yield call._replace(inputs=pieces), lambda: None
    finally:
        with gpu.current():
            cuda.free(stream, whole)


def _copy(stream: int, sources: Sequence[Span], targets: Sequence[Span]) -> None:
    for source, to in zip(sources, targets, strict=True):
        cuda.copy(stream, to[0], *source)


class _Work:
    """NCCL's work of one call, which ends at an event."""

    def __init__(self, queue: _Queue, done: Any, arrays: list[Any]) -> None:
        self._queue = queue
        self._done = done
        self._arrays = arrays
        self._is_completed = False

    def is_completed(self) -> bool:
        if self._is_completed:
            return True
        self._queue.communicator.check()
        if not cuda.has_come(self._done):
            return False
        self._is_completed = True
        self._arrays = []
        self._queue.running.discard(self)
        self._queue.communicator.gpu.give_back(self._done)
        return True

    def let_streams_wait(self) -> None:
        arrays = self._arrays
        if self._is_completed:
            return
        with self._queue.communicator.gpu.current():
            for stream in cuda_array.current_streams(arrays):
                cuda.let_wait(stream, self._done)
        if any(cuda_array.current_stream(array) is None for array in arrays):
            while not self._is_completed and not cuda.has_come(self._done):
                self._queue.communicator.check()
                time.sleep(_PAUSE_SECONDS)


class _Type(NamedTuple):
    """In which elements NCCL handles memory, and by which operation it combines them."""

    number: int
    nbytes: int
    op: int | None = None
    """None for PREMUL_SUM, whose operation is made for the call."""

    def count(self, span: Span) -> int:
        return span[1] // self.nbytes


def _reduction(reduce_op: str, dtype: str) -> _Type | None:
    """Return how NCCL combines elements of a type; None where it does not, or not as procgroup does.

    NCCL's mean of integers is that of a sum which may have wrapped around.
    """
    if dtype == "bool":
        return _Type(_BYTES, 1, _OPS[_BOOL_OPS[reduce_op]]) if reduce_op in _BOOL_OPS else None
    is_sum = reduce_op in ("SUM", "AVG", "PREMUL_SUM")
    element = _PARTS.get(dtype, dtype) if is_sum else dtype
    if element not in _DTYPES or (reduce_op not in _OPS and reduce_op != "PREMUL_SUM"):
        return None
    if reduce_op in ("AVG", "PREMUL_SUM") and element not in _FLOATS:
        return None
    return _Type(_DTYPES[element], itemsize_of(element), _OPS.get(reduce_op))


Step = Callable[[Any, Any, int], None]
"""A call of NCCL's, given the number of an operation, and the handles of a communicator and of a stream."""


def _steps(call: DeviceCall, rank: int) -> list[Step]:
    """Return the calls of NCCL's that together move the bytes of a call, whose equal blocks are in one piece."""
    make = {"broadcast": _broadcast, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    if call.op in ("all_reduce", "reduce"):
        return [
            _reduce(call, source, to, None if call.op == "all_reduce" else call.root)
            for source, to in zip(call.inputs, call.outputs or call.inputs, strict=True)
            if source[1]
        ]
    return make.get(call.op, _messages)(call, rank)


def _broadcast(call: DeviceCall, rank: int) -> list[Step]:
    (span,) = call.inputs or call.outputs
    return [_broadcast_from(call.root, span, span)]


def _all_gather(call: DeviceCall, rank: int) -> list[Step]:
    (own,) = call.inputs
    if _are_equal(call.outputs):
        to = call.outputs[0][0]
        return [lambda op, comm, stream: bindings().all_gather(own[0], to, own[1], _BYTES, comm, stream)]
    return [
        _broadcast_from(root, own if root == rank else span, span) for root, span in enumerate(call.outputs) if span[1]
    ]


def _reduce_scatter(call: DeviceCall, rank: int) -> list[Step]:
    (to,) = call.outputs
    if not _are_equal(call.inputs):
        return [
            _reduce(call, span, to if root == rank else span, root) for root, span in enumerate(call.inputs) if span[1]
        ]
    source, kind = call.inputs[0][0], _kind_of(call)
    count = kind.count(to)
    return [lambda op, comm, stream: bindings().reduce_scatter(source, to[0], count, kind.number, op, comm, stream)]


def _messages(call: DeviceCall, rank: int) -> list[Step]:
    """Return the sends and receives of a message, and of collectives that consist of messages."""
    sends, receives = {
        "send": ([(1, span) for span in call.inputs], []),  # in a communicator of the sender and the receiver
        "recv": ([], [(0, span) for span in call.outputs]),
        "gather": ([(call.root, span) for span in call.inputs], list(enumerate(call.outputs))),
        "scatter": (list(enumerate(call.inputs)), [(call.root, span) for span in call.outputs]),
        "all_to_all": (list(enumerate(call.inputs)), list(enumerate(call.outputs))),
    }[call.op]
    return [
        *(_send(span, peer) for peer, span in sends if span[1]),
        *(_receive(span, peer) for peer, span in receives if span[1]),
    ]


def _reduce(call: DeviceCall, source: Span, to: Span, root: int | None) -> Step:
    """Reduce on all ranks, or on ``root``: the others' ``to`` is not written."""
    kind = _kind_of(call)
    count, number = kind.count(source), kind.number
    if root is None:
        return lambda op, comm, stream: bindings().all_reduce(source[0], to[0], count, number, op, comm, stream)
    return lambda op, comm, stream: bindings().reduce(source[0], to[0], count, number, op, root, comm, stream)


def _broadcast_from(root: int, source: Span, to: Span) -> Step:
    return lambda op, comm, stream: bindings().broadcast(source[0], to[0], to[1], _BYTES, root, comm, stream)


def _send(span: Span, peer: int) -> Step:
    return lambda op, comm, stream: bindings().send(*span, _BYTES, peer, comm, stream)


def _receive(span: Span, peer: int) -> Step:
    return lambda op, comm, stream: bindings().recv(*span, _BYTES, peer, comm, stream)


def _are_equal(spans: Sequence[Span]) -> bool:
    """Return whether there are blocks, and they have one size: the same on all ranks."""
    return len({nbytes for _, nbytes in spans}) == 1


def _are_one_piece(spans: Sequence[Span]) -> bool:
    """Return whether blocks of one size follow each other without a gap."""
    address, nbytes = spans[0]
    return all(span == (address + place * nbytes, nbytes) for place, span in enumerate(spans))


def _kind_of(call: DeviceCall) -> _Type:
    kind = _reduction(call.reduce_op or "", call.dtype)
    assert kind is not None, "begin has refused it"
    return kind


def _enqueue(steps: Sequence[Step], call: DeviceCall, communicator: Any, stream: int) -> None:
    """Make these calls of NCCL's, as one."""
    nccl = bindings()
    op = made = None
    if call.reduce_op == "PREMUL_SUM":
        kind = _kind_of(call)
        factor = ctypes.create_string_buffer(_factor(call.factor, call.dtype))
        op = made = nccl.red_op_create_pre_mul_sum(ctypes.addressof(factor), kind.number, _HOST_VALUE, communicator)
    elif call.reduce_op is not None:
        op = _kind_of(call).op
    try:
        if len(steps) == 1:
            steps[0](op, communicator, stream)
            return
        nccl.group_start()
        try:
            for step in steps:
                step(op, communicator, stream)
        finally:
            nccl.group_end()
    finally:
        if made is not None:
            nccl.red_op_destroy(made, communicator)


def _factor(value: float, dtype: str) -> bytes:
    return bytes(numpy_dtype(_PARTS.get(dtype, dtype)).type(value).tobytes())
