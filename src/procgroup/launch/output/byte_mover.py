"""Read processes' pipes and write the launcher's outputs; no single one of them blocks the others."""

from __future__ import annotations

import os
import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

from procgroup.launch.output.sinks import Sink

FLUSH_SECONDS = 1.0
"""How long to try, after a signal, to write output that its reader does not read."""

_PENDING_BYTES = 1 << 20
_READ_BYTES = 64 * 1024
# The largest content of a pipe whose writer has ended (the largest size that an ordinary user may set).
_PIPE_BYTES = 1 << 20
_LONGEST_POLL_SECONDS = 86400.0  # poll() takes a number of milliseconds of 32 bits


class PipeReader(ABC):
    """The reading end of a pipe, which never blocks. A subclass handles the data, which is for ``sink``."""

    def __init__(self, descriptor: int, sink: Sink) -> None:
        self.descriptor = descriptor
        self.sink = sink
        self.open: bool = True
        os.set_blocking(descriptor, False)

    @abstractmethod
    def _take(self, data: bytes) -> None:
        """Handle data that was read."""

    @abstractmethod
    def _finish(self) -> None:
        """Handle the end of the stream."""

    def read_some(self) -> bool:
        """Read once; return whether there was data. Closes the pipe at its end."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._take(data)
        else:
            self.close()
        return bool(data)

    def close(self) -> None:
        """Close the pipe, and handle the end of the stream. Idempotent."""
        if self.open:
            self.open = False
            os.close(self.descriptor)
            self._finish()

    def drain(self) -> None:
        """Read the rest of an ended process's output, without waiting for other processes that hold the pipe open."""
        taken = 0
        while self.open and taken <= _PIPE_BYTES and self.read_some():
            taken += _READ_BYTES
        self.close()


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
