"""Signals to the launcher, delivered to its loop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from procgroup.launch.nodes.wake_pipe import WakePipe

_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


def with_forwarded(ending: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that end the ranks, and those that are only forwarded to them."""
    return [*ending, *(number for number in _FORWARDED if number not in ending)]


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
