"""Defer Ctrl-C during a step that must not be interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class DeferredInterrupt:
    """A context manager for the main thread that defers a Ctrl-C to its end.

    A second Ctrl-C takes effect at once. Nothing is deferred where SIGINT has no Python handler, because it raises no
    exception then. A child that is forked inside gets the earlier handler.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._deferred = False
        os.register_at_fork(after_in_child=self._restore)

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._deferred = False
            signal.signal(signal.SIGINT, self._defer)
            self._handler = handler

    def __exit__(self, *exception: object) -> None:
        handler = self._handler
        self._restore()
        if handler is not None and self._deferred:
            handler(signal.SIGINT, None)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._deferred and self._handler is not None:
            self._handler(number, frame)
        self._deferred = True

    def _restore(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None
