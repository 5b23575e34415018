"""A pipe by which another thread, or Python's signal handling, ends the wait of a loop."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class WakePipe:
    """A loop waits until ``descriptor`` can be read; ``wake`` makes it readable, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self.descriptor: int
        self.write_end: int
        self.descriptor, self.write_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self.write_end, False)

    def wake(self) -> None:
        """End the loop's wait, or its next one; do nothing after ``close``."""
        with self._lock, suppress(BlockingIOError):  # the pipe is full, so the loop does not wait
            if not self._is_closed:
                os.write(self.write_end, b".")

    def drain(self) -> None:
        """Forget the wakes that have come, so that the loop can wait again."""
        with suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass

    def close(self) -> None:
        """Close both ends, while other threads may still call ``wake``."""
        with self._lock:
            self._is_closed = True
            os.close(self.descriptor)
            os.close(self.write_end)
