"""The interface of a backend, which moves the bytes of a group's calls in place of the engine's own transport.

The engine numbers and records each call, and compares it with the other ranks' calls, before the backend sees it::

    group.all_reduce(x)   engine: check, number, record, agree   backend: move   engine: deadline, deaths, Ctrl-C

So a backend needs no checks, no waits and no deadlines. It says which calls it makes (``supports``), and moves the
bytes of one call in a generator that yields wherever it would wait for another rank. The engine runs ``barrier``
itself: the agreement on the call is the barrier. A generator must not wait in any other way: a blocking call on a
group, or destroy_process_group, raises DistBackendError there.

A backend that has to make something together with the other ranks, such as a communicator, is an OpeningBackend. One
whose calls native code moves is a NativeBackend. Arrays in the memory of a device are moved by a DeviceBackend: its
part of a call ends when the work on the device has started, and the group follows that work to its end. Without one
they are copied to host memory and back (backends/staging.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from procgroup.arrays.array_view import DTYPES
from procgroup.errors import DistBackendError
from procgroup.stores.store import Store
from procgroup.types import ReduceOp

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from procgroup import _native

Awaited = int | Sequence[int] | None
"""The group ranks that a transfer waits for: one, several, or None where the backend does not know."""


class Call(NamedTuple):
    """One call that all ranks of the group have agreed on, with the blocks of this rank.

    A block is one-dimensional and of bytes (uint8), in the call's memory: ``block.view(dtype)`` has the elements.
    Input blocks must not be written. A block keeps its memory alive, but the caller may change it after the call.
    """

    op: str
    """A name of ``_native.operations()``: "all_reduce", "all_gather", ... List and single forms share a name."""
    inputs: list[NDArray[np.uint8]]
    """The blocks that this rank sends: one, or one for each rank; empty where it sends none."""
    outputs: list[NDArray[np.uint8]]
    """The blocks that this rank receives, likewise. An output may be the same memory as the rank's own input."""
    dtype: str
    """NumPy's name: "float32", "bfloat16"."""
    reduce_op: str | None
    """"SUM", "MAX", ...; None where nothing is reduced. A PREMUL_SUM is a SUM of inputs that are multiplied already."""
    root: int
    """The group rank of the root; of a message, that of the other rank; otherwise -1."""
    tag: int
    """Of a message."""
    number: int = 0
    """The same on all ranks of the call: the number of a collective in its group, or the number that the sender of a
    message gave to no other message."""


Span = tuple[int, int]
"""Memory of a device: an address, and a number of bytes."""


class DeviceCall(NamedTuple):
    """One call on contiguous arrays in the memory of one device; the fields that Call has, too, mean the same."""

    op: str
    inputs: list[Span]
    """Several coalesced arrays of an all_reduce are as many inputs and outputs."""
    outputs: list[Span]
    dtype: str
    reduce_op: str | None
    """For PREMUL_SUM the inputs are still to be multiplied by ``factor``."""
    factor: float
    root: int
    device: int
    """The number of the device in this process."""
    arrays: list[Any]
    """The arrays themselves. The group keeps them until the call's work has ended, also when it has failed."""
    number: int = 0
    """Of a collective as in Call; of a message, its place among those from its sender to its receiver, from 0."""


class DeviceWork(Protocol):
    """What one call has started on a device."""

    def is_completed(self) -> bool:
        """Return whether the device has finished. Called again and again, on any thread, one at a time.

        An exception ends the group, as one of ``move`` does.
        """
        ...

    def let_streams_wait(self) -> None:
        """Let the work that is queued from now on, where the call's arrays are used, wait for this work."""
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """Moves the bytes of one group's calls on arrays of one kind of device.

    Collectives start one after the other, in the same order on all ranks; messages start concurrently.
    """

    def supports(self, op: str, dtype: str, reduce_op: str) -> bool:
        """Return whether it makes such calls, the same on all ranks; others are staged through host memory.

        ``reduce_op`` is "" where nothing is reduced.
        """
        ...

    def begin(self, call: DeviceCall) -> Any:
        """Take note of what a call has to wait for on the device, in the thread that issues it, and return that.

        Raises what refuses the call, before anything is sent.
        """
        ...

    def move(self, call: DeviceCall, begun: Any) -> Generator[Awaited, None, DeviceWork | None]:
        """Start the call's work on the device, and return it; a generator as that of Backend."""
        ...

    def end_work(self) -> None:
        """End all work on the device, because the group has failed: it may wait for a rank that is lost.

        Called at most once, from any thread; does not wait for the end.
        """
        ...

    def close(self, failed: bool) -> None:
        """See Backend.close."""
        ...


class Backend(Protocol):
    """Moves the bytes of one group's calls on arrays of one kind of device."""

    def supports(self, op: str, dtype: str, reduce_op: str) -> bool:
        """Return whether it makes such calls, the same on all ranks; others raise before anything is sent.

        ``reduce_op`` is "" where nothing is reduced. The answers for "send" and "recv" must be the same, too.
        """
        ...

    def move(self, call: Call) -> Iterator[Awaited]:
        """Move the bytes of a call; a generator that yields wherever it would wait for another rank.

        It yields the group rank that it waits for, or a list of them, which a timeout names; None where it knows none.
        The generator runs on any thread, one step at a time. Collectives of a group move one after the other, in the
        same order on all ranks; messages move concurrently. An exception ends the group: this rank's call raises
        GroupBroken from it, and the other ranks' calls raise PeerFailed.
        """
        ...

    def close(self, failed: bool) -> None:
        """Free the backend's resources. Called once, when this rank leaves the group.

        ``failed`` says whether the group has failed, or has lost a rank.

        Asynchronous calls have completed; the generator of a call for which another thread still waits may be advanced
        a few more times.
        """
        ...


@runtime_checkable
class OpeningBackend(Protocol):
    """A backend that gets ready together with the other ranks."""

    def open(self) -> Iterator[Awaited]:
        """Get ready; a generator as that of ``move``, which runs once, before the first call, when all ranks have come.

        What must be said in the same words on every rank is not raised here, but in the first ``move``, or in
        ``attach``: an exception here is raised on this rank only, and PeerFailed on the others.
        """
        ...


@runtime_checkable
class NativeBackend(Protocol):
    """A backend whose calls native code moves; it may be an OpeningBackend, too."""

    def attach(self, calls: _native.Group) -> None:
        """Let native code move the bytes of these calls. Called once, when the backend is open."""
        ...

    def close(self, failed: bool) -> None:
        """See Backend.close."""
        ...


AnyBackend = Backend | NativeBackend | DeviceBackend
MakeBackends = Callable[[Store, int, int, timedelta], Mapping[str, AnyBackend]]
"""From a group's store, rank, size and timeout to its backends by kind of device: "cpu", "cuda"."""


def no_backends(store: Store, rank: int, size: int, timeout: timedelta) -> Mapping[str, AnyBackend]:
    """Leave all kinds of devices to the engine's own transport."""
    return {}


Advance = Callable[[int, int], list[int] | DeviceWork | None]
"""Advances a transfer, given the call's root and number: None, or the work that it has started on a device, when this
rank's part has completed, else the ranks that the transfer waits for."""


def use(backend: AnyBackend, name: str, calls: _native.Group, where: str, size: int, seconds: float) -> None:
    """Let a backend move the bytes of a group's calls, from now on. ``name`` and ``where`` are for errors.

    Raises what the backend raises, and CollectiveTimeout when it is not open on all ranks after ``seconds``.
    """
    if isinstance(backend, OpeningBackend):
        opening = backend
        calls.open_backend(_advancing(lambda root, number: opening.open(), size), seconds)
    if isinstance(backend, NativeBackend):
        backend.attach(calls)
    elif isinstance(backend, DeviceBackend):
        calls.set_device_backend(_prepare_on_device(backend, size), backend.supports, backend.end_work)
    else:
        calls.set_backend(prepare(backend, name, where, size))


def _prepare_on_device(backend: DeviceBackend, size: int) -> Callable[..., Advance]:
    def prepare_call(*fields: Any) -> Advance:
        call = DeviceCall(*fields)
        begun = backend.begin(call)
        return _advancing(lambda root, number: backend.move(call._replace(root=root, number=number), begun), size)

    return prepare_call


def prepare(backend: Backend, name: str, where: str, size: int) -> Callable[..., Advance]:
    """Return the function that turns a call's data into the function that advances its transfer.

    The returned function raises DistBackendError for a call that the backend does not support.
    """

    def prepare_call(*fields: Any) -> Advance:
        call = Call(*fields)
        reduce_op = "SUM" if call.reduce_op == "PREMUL_SUM" else call.reduce_op
        if not backend.supports(call.op, call.dtype, reduce_op or ""):
            what = f"{call.op}({call.reduce_op})" if call.reduce_op else call.op
            raise DistBackendError(
                f"{what} of {call.dtype} on {where}: its backend {name!r} ({type(backend).__name__}) does not support "
                f"this call. Use {_alternatives(backend, call._replace(reduce_op=reduce_op))}a group with the built-in "
                "transport: new_group(backend='gloo')."
            )
        call = call._replace(reduce_op=reduce_op)
        return _advancing(lambda root, number: backend.move(call._replace(root=root, number=number)), size)

    return prepare_call


def _alternatives(backend: Backend, call: Call) -> str:
    """Return with which reduce ops and dtypes the backend supports the operation, as the start of an enumeration."""
    from procgroup import _native

    def is_supported(dtype: str, op: str) -> bool:
        return backend.supports(call.op, dtype, op) and (not op or _native.supports(ReduceOp[op].value, dtype))

    names = [op.name for op in ReduceOp if op is not ReduceOp.PREMUL_SUM]
    ops = [op for op in names if call.reduce_op and is_supported(call.dtype, op)]
    dtypes = [dtype for dtype in sorted(DTYPES) if is_supported(dtype, call.reduce_op or "")]
    found = (("reduce op", ops), ("dtype", dtypes))
    return "".join(f"the {kind} {', '.join(names)}, or " for kind, names in found if names)


def _advancing(start: Callable[[int, int], Iterable[Awaited]], size: int) -> Advance:
    moving: Iterator[Awaited] | None = None

    def advance(root: int, number: int) -> list[int] | DeviceWork | None:
        nonlocal moving
        if moving is None:
            moving = iter(start(root, number))
        try:
            awaited = next(moving)
        except StopIteration as end:
            work: DeviceWork | None = end.value
            return work
        return _ranks(awaited, size)

    return advance


def _ranks(awaited: Any, size: int) -> list[int]:
    """Return what a transfer yields as a list of ranks. Raises ValueError for what is none."""
    if awaited is None:
        return []
    ranks = [awaited] if isinstance(awaited, int) else list(awaited)
    if not all(isinstance(rank, int) and 0 <= rank < size for rank in ranks):
        raise ValueError(f"Backend.move must yield ranks from 0 to {size - 1}, or None, but yielded {awaited!r}")
    return ranks
