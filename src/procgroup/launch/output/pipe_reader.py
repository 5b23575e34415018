"""Read the output of a process from a pipe, without blocking."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from procgroup.launch.output.sinks import Sink

READ_BYTES = 64 * 1024

# The largest content of a pipe whose writer has ended (the largest size that an ordinary user may set).
_PIPE_BYTES = 1 << 20


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
            data = os.read(self.descriptor, READ_BYTES)
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
            taken += READ_BYTES
        self.close()
