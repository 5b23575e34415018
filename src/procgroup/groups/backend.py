"""The interface of a backend, which moves the bytes of a group's calls in place of the engine's own transport.

The engine numbers and records each call, and compares it with the other ranks' calls, before the backend sees it::

    group.all_reduce(x)   engine: check, number, record, agree   backend: move   engine: deadline, deaths, Ctrl-C

So a backend needs no checks, no waits and no deadlines. It lists the operations that it supports (``supports``), and
moves the bytes of one call in a generator that yields wherever it would wait for another rank. The engine runs
``barrier`` itself: the agreement on the call is the barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from procgroup.errors import DistBackendError
from procgroup.stores.store import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_END = object()


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
    """"SUM", "MAX", ...; None where nothing is reduced. For PREMUL_SUM the inputs are multiplied already."""
    root: int
    """The group rank of the root; of a message, that of the other rank; otherwise -1."""
    tag: int
    """Of a message."""


class Backend(Protocol):
    """Moves the bytes of one group's calls on arrays of one kind of device."""

    @property
    def supports(self) -> Collection[str]:
        """The supported operations, the same on all ranks; others raise before anything is sent."""
        ...

    def move(self, call: Call) -> Iterator[object]:
        """Move the bytes of a call; a generator that yields wherever it would wait for another rank.

        The generator runs on any thread, one step at a time. Collectives of a group move one after the other, in the
        same order on all ranks; messages move concurrently. An exception ends the group: this rank's call raises
        GroupBroken from it, and the other ranks' calls raise PeerFailed.
        """
        ...

    def close(self) -> None:
        """Free the backend's resources. Called once, when this rank leaves the group.

        Asynchronous calls have completed; the generator of a call for which another thread still waits may be advanced
        a few more times.
        """
        ...


MakeBackends = Callable[[Store, int, int, timedelta], Mapping[str, Backend]]
"""From a group's store, rank, size and timeout to its backends by kind of device: "cpu", "cuda"."""


def no_backends(store: Store, rank: int, size: int, timeout: timedelta) -> Mapping[str, Backend]:
    """Leave all kinds of devices to the engine's own transport."""
    return {}


def prepare(backend: Backend, where: str) -> Callable[..., Callable[[int], bool]]:
    """Return the function that turns a call's data into the function that advances its transfer.

    The returned function raises DistBackendError for an operation that the backend does not support.
    """

    def prepare_call(*fields: Any) -> Callable[[int], bool]:
        call = Call(*fields)
        if call.op not in backend.supports:
            raise DistBackendError(
                f"{call.op} on {where}: its backend {type(backend).__name__} does not support it, but "
                f"{', '.join(sorted(backend.supports))}."
            )
        moving: Iterator[object] | None = None

        def advance(root: int) -> bool:
            nonlocal moving
            if moving is None:
                moving = iter(backend.move(call._replace(root=root)))
            return next(moving, _END) is _END

        return advance

    return prepare_call
