"""Move bytes from processes' pipes to the launcher's outputs; no single one of them blocks the others."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable, Mapping

from procgroup.launch.output.pipe_reader import PipeReader
from procgroup.launch.output.sinks import Sink

FLUSH_SECONDS = 1.0
"""How long to try, after a signal, to write output that its reader does not read."""

_PENDING_BYTES = 1 << 20
_LONGEST_POLL_SECONDS = 86400.0  # poll() takes a number of milliseconds of 32 bits


def move_bytes(
    sources: Iterable[PipeReader],
    sinks: Iterable[Sink],
    wake: Iterable[int],
    timeout: float | None,
    others: Mapping[int, Callable[[], object]] | None = None,
) -> None:
    """Wait until a source can be read or a sink written, at most ``timeout`` seconds; then read and write.

    A readable ``wake`` descriptor ends the wait; a readable descriptor of ``others`` calls its function. Sources of a
    sink with too much pending output are not read; those of a broken sink are closed, so that their writers get an
    error.
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
    """Call ``move(seconds)`` until all output is written, at most FLUSH_SECONDS once a signal has come."""
    began = time.monotonic()
    while any(sink.pending for sink in sinks):
        if was_interrupted() and time.monotonic() - began > FLUSH_SECONDS:
            return
        move(FLUSH_SECONDS)
