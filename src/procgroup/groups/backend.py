"""The interface of a backend, which moves the bytes of a group's calls in place of the engine's own transport.

The engine numbers and records each call, and compares it with the other ranks' calls, before the backend sees it::

    group.all_reduce(x)   engine: check, number, record, agree   backend: move   engine: deadline, deaths, Ctrl-C

So a backend needs no checks, no waits and no deadlines. It says which calls it makes (``supports``), and moves the
bytes of one call in a generator that yields wherever it would wait for another rank. The engine runs ``barrier``
itself: the agreement on the call is the barrier. A generator must not wait in any other way: a blocking call on a
group, or destroy_process_group, raises DistBackendError there.

A backend that has to make something together with the other ranks, such as a communicator, also has ``open``. That is
a generator like ``move``, and runs once, before the first call, when all ranks have come. An exception in ``open`` is
raised on this rank only, and the others raise PeerFailed. So an error that must have the same words on every rank is
raised in the first ``move``, or in ``attach``.

A backend whose calls native code moves has ``attach`` in place of ``supports`` and ``move``: it gives the native group
MPI's or NCCL's part. Arrays on a GPU are moved by NCCL, or copied to host memory and back: a backend sees arrays in
host memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
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
    """A name of ``_native.operations()``: "all_reduce", "all_gather", ... List and single forms share a name, and
    each operation in which the sizes are agreed on by pair of ranks is an "all_to_all"."""
    inputs: list[NDArray[np.uint8]]
    """The blocks that this rank sends: one, or one for each rank; empty where it sends none."""
    outputs: list[NDArray[np.uint8]]
    """The blocks that this rank receives, likewise. An output may be the same memory as the rank's own input."""
    dtype: str
    """NumPy's name: "float32", "bfloat16"."""
    reduce_op: str | None
    """"SUM", "MAX", ...; None where nothing is reduced. Inputs are prepared: a PREMUL_SUM is a SUM of inputs that
    are multiplied already, and LAND, LOR and LXOR are BAND, BOR and BXOR of inputs that are 0 or 1."""
    root: int
    """The group rank of the root; of a message, that of the other rank; otherwise -1."""
    tag: int
    """Of a message."""
    number: int = 0
    """The same on all ranks of the call: the number of a collective in its group, or the number that the sender of a
    message gave to no other message."""


class Backend(Protocol):
    """Moves the bytes of one group's calls on arrays in host memory."""

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
        GroupBroken from it, and the other ranks' calls raise PeerFailed. The generator of a call that fails otherwise
        is closed.
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
class NativeBackend(Protocol):
    """A backend whose calls native code moves: MPI or NCCL."""

    def attach(self, calls: _native.Group) -> None:
        """Let native code move the bytes of these calls. Called once, when the backend is open."""
        ...

    def close(self, failed: bool) -> None:
        """See Backend.close."""
        ...


AnyBackend = Backend | NativeBackend
MakeBackends = Callable[[Store, int, int, timedelta], Mapping[str, AnyBackend]]
"""From a group's store, rank, size and timeout to its backends by kind of device: "cpu", "cuda"."""


def no_backends(store: Store, rank: int, size: int, timeout: timedelta) -> Mapping[str, AnyBackend]:
    """Leave all kinds of devices to the engine's own transport."""
    return {}


Start = Callable[[int, int], Iterator[Awaited]]
"""Starts a transfer, given the call's root and number: the generator of ``move``."""


def use(backend: AnyBackend, name: str, calls: _native.Group, where: str, seconds: float) -> None:
    """Let a backend move the bytes of a group's calls, from now on. ``name`` and ``where`` are for errors.

    Raises what the backend raises, and CollectiveTimeout when it is not open on all ranks after ``seconds``.
    """
    if (opening := getattr(backend, "open", None)) is not None:
        calls.open_backend(lambda root, number: opening(), seconds)
    if isinstance(backend, NativeBackend):
        backend.attach(calls)
    else:
        calls.set_backend(prepare(backend, name, where))


def prepare(backend: Backend, name: str, where: str) -> Callable[..., Start]:
    """Return the function that turns a call's data into the function that starts its transfer.

    The returned function raises DistBackendError for a call that the backend does not support.
    """

    def prepare_call(*fields: Any) -> Start:
        call = Call(*fields)
        reduce_op = call.reduce_op and combining(call.reduce_op)
        if not backend.supports(call.op, call.dtype, reduce_op or ""):
            what = f"{call.op}({call.reduce_op})" if call.reduce_op else call.op
            raise DistBackendError(
                f"{what} of {call.dtype} on {where}: its backend {name!r} ({type(backend).__name__}) does not support "
                f"this call. Use {_alternatives(backend, call._replace(reduce_op=reduce_op))}a group with the built-in "
                "transport: new_group(backend='gloo')."
            )
        call = call._replace(reduce_op=reduce_op)
        return lambda root, number: backend.move(call._replace(root=root, number=number))

    return prepare_call


@cache
def combining(reduce_op: str) -> str:
    """Return the op that combines what ranks have prepared for a reduce op: SUM for PREMUL_SUM, most for themselves."""
    from procgroup import _native

    return next(row["combines"] for row in _native.reduce_ops() if row["name"] == reduce_op)


def _alternatives(backend: Backend, call: Call) -> str:
    """Return with which reduce ops and dtypes the backend supports the operation, as the start of an enumeration."""
    from procgroup import _native

    def is_supported(dtype: str, op: str) -> bool:
        return backend.supports(call.op, dtype, op) and (not op or _native.supports(ReduceOp[op].value, dtype))

    names = [op.name for op in ReduceOp if combining(op.name) == op.name]
    ops = [op for op in names if call.reduce_op and is_supported(call.dtype, op)]
    dtypes = [dtype for dtype in sorted(DTYPES) if is_supported(dtype, call.reduce_op or "")]
    found = (("reduce op", ops), ("dtype", dtypes))
    return "".join(f"the {kind} {', '.join(names)}, or " for kind, names in found if names)
