"""Reading the output of a process from a pipe, as it comes and to its end."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

READ_BYTES = 64 * 1024

# What a pipe can still hold when its writer has ended (the largest that an ordinary user may make it).
_PIPE_BYTES = 1 << 20


class PipeReader(ABC):
    """The reading end of a pipe, which never waits. What to do with the data is a subclass's."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.open: bool = True
        os.set_blocking(descriptor, False)

    @abstractmethod
    def _take(self, data: bytes) -> None:
        """Take what was read."""

    @abstractmethod
    def _finish(self) -> None:
        """Show what is left: nothing more is read."""

    def read_some(self) -> bool:
        """Take what is there, once; return whether there was anything. Closes the pipe at its end."""
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
        """Show what is left and let go of the pipe. Idempotent."""
        if self.open:
            self.open = False
            os.close(self.descriptor)
            self._finish()

    def drain(self) -> None:
        """Take all that an ended process left in the pipe, but do not wait for others who hold it open."""
        taken = 0
        while self.open and taken <= _PIPE_BYTES and self.read_some():
            taken += READ_BYTES
        self.close()
