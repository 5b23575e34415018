"""Moving bytes from the pipes of processes to the launcher's outputs, without waiting for any one of them."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from procgroup.launch.output.sinks import Sink

FLUSH_SECONDS = 1.0
"""How long, after a signal, to try to write what the reader of the output does not take."""

_PENDING_BYTES = 1 << 20
_LONGEST_POLL_SECONDS = 86400.0  # poll() takes a number of milliseconds of 32 bits


class Source(Protocol):
    """A pipe that is read as there is room in its sink."""

    descriptor: int
    open: bool
    sink: Sink

    def read_some(self) -> bool: ...

    def close(self) -> None: ...


def move_bytes(
    sources: Iterable[Source],
    sinks: Iterable[Sink],
    wake: Iterable[int],
    timeout: float | None,
    others: Mapping[int, Callable[[], object]] | None = None,
) -> None:
    """Read from the sources and write to the sinks what can be, once something can be.

    A byte at a ``wake`` descriptor ends the wait; one at a descriptor of ``others`` calls its function. While a sink is
    behind, its sources wait; those of a broken sink are closed, so that their writers get an error.
    """
    with selectors.PollSelector() as selector:
        for descriptor in wake:
            selector.register(descriptor, selectors.EVENT_READ)
        for descriptor, act in (others or {}).items():
            selector.register(descriptor, selectors.EVENT_READ, act)
        for sink in set(sinks):
            if sink.pending:
                selector.register(sink.descriptor, selectors.EVENT_WRITE, sink.write_some)
        for source in sources:
            if source.sink.broken:
                source.close()
            elif source.open and source.sink.pending < _PENDING_BYTES:
                selector.register(source.descriptor, selectors.EVENT_READ, source.read_some)
        for key, _ in selector.select(None if timeout is None else min(timeout, _LONGEST_POLL_SECONDS)):
            if key.data is not None:
                key.data()


def flush(sinks: Iterable[Sink], move: Callable[[float], None], was_interrupted: Callable[[], bool]) -> None:
    """Call ``move(seconds)`` until all is written; somebody who has sent a signal need not wait for it long."""
    began = time.monotonic()
    while any(sink.pending for sink in sinks):
        if was_interrupted() and time.monotonic() - began > FLUSH_SECONDS:
            return
        move(FLUSH_SECONDS)
