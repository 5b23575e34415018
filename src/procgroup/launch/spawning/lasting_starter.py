"""Start processes from a thread that lives as long as this process does.

A child that asked the kernel to die with its parent is killed when the *thread* that started it ends. The main thread
lives as long as the process, but other threads may end early. For those, one thread is kept that only starts processes.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

_Answers = queue.SimpleQueue[BaseException | None]


class LastingStarter:
    """Starts multiprocessing processes; may be used from every thread, and in a forked child."""

    def __init__(self) -> None:
        self._interrupt = DeferredInterrupt()
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[tuple[BaseProcess, _Answers]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget_thread)

    def start(self, process: BaseProcess, started: list[BaseProcess]) -> None:
        """Call ``process.start()``, which may raise, and add the process to ``started``.

        A Ctrl-C is deferred, so that every process that runs is in the list, and can be ended.
        """
        if threading.current_thread() is threading.main_thread():
            with self._interrupt:
                process.start()
                started.append(process)
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="procgroup-starter", daemon=True)
                self._thread.start()
        answers: _Answers = queue.SimpleQueue()
        self._requests.put((process, answers))
        error = answers.get()
        if error is not None:
            raise error
        started.append(process)

    def _serve(self) -> None:
        while True:
            process, answers = self._requests.get()
            try:
                process.start()
            except BaseException as error:
                answers.put(error)
            else:
                answers.put(None)

    def _forget_thread(self) -> None:
        """Reset in a forked child, which has no other threads and may have copied a held lock."""
        self._lock = threading.Lock()
        self._requests = queue.SimpleQueue()
        self._thread = None


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
