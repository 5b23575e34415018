"""Ends of the wait of the launcher's loop: wakes of other threads, and signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


def with_forwarded(ending: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that end the ranks, and those that are only forwarded to them."""
    return [*ending, *(number for number in _FORWARDED if number not in ending)]


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


class SignalInbox:
    """Collects the given signals; each makes ``descriptor`` readable.

    A SIGHUP that is ignored on entry (``nohup``) stays ignored. Use as a context manager in the main thread; the end
    restores the earlier handlers.
    """

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "the launcher was called in a thread other than the main one, where Python delivers no signals; "
                "call it in the main thread"
            )
        self._numbers = [number for number in numbers if not _kept_ignored(number)]
        self._received: list[signal.Signals] = []
        self._earlier: dict[signal.Signals, Any] = {}
        self._wakes = WakePipe()
        self.descriptor: int = self._wakes.descriptor

    def __enter__(self) -> SignalInbox:
        self._earlier_wakeup = signal.set_wakeup_fd(self._wakes.write_end, warn_on_full_buffer=False)
        for number in self._numbers:
            self._earlier[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._earlier_wakeup)
        self._wakes.close()

    def take(self) -> list[signal.Signals]:
        """Return the signals that have come since the last call, in order."""
        self._wakes.drain()
        received, self._received = self._received, []
        return received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))


def _kept_ignored(number: signal.Signals) -> bool:
    return number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
