"""Threads for the callbacks of torch's futures: each callback runs on an idle thread, or on a new one.

A callback may wait for another call, as that of the PowerSGD hook does. The one thread that completes procgroup's calls
would then wait for itself.

A process must not end while a callback runs: the interpreter ends the thread where it next asks for it, which is inside
torch's C++ code, and that takes it for an exception and aborts the process. So the end waits for them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from procgroup.process import log, log_handler  # noqa: F401 - torch has imported logging: now, for forked ranks, too
from procgroup.process.process_end import SILENT_SECONDS, at_process_end

Task = Callable[[], object]

_IDLE_SECONDS = 10.0
_END_SECONDS = 30.0


class _Threads:
    """As many threads as there are tasks that run at once. Those that are idle for long end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._idle = 0
        self._unfinished = 0

    def run(self, task: Task) -> None:
        from procgroup import _native  # loaded with the group

        with self._changed:
            self._unfinished += 1
            _native.add_own_tasks(1)
            if self._idle > len(self._tasks):
                self._tasks.append(task)
                self._changed.notify()
                return
        threading.Thread(target=self._work, args=(task,), name="procgroup-callbacks", daemon=True).start()

    def finish(self, seconds: float) -> bool:
        """Wait for all tasks, at most so many seconds; return whether all have completed."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, seconds)

    def _work(self, first: Task) -> None:
        from procgroup import _native

        _native.add_own_thread()
        task: Task | None = first
        while task is not None:
            task()
            task = self._next()

    def _next(self) -> Task | None:
        from procgroup import _native

        with self._changed:
            self._unfinished -= 1
            _native.add_own_tasks(-1)
            if not self._unfinished:
                self._changed.notify_all()
            self._idle += 1
            self._changed.wait_for(lambda: self._tasks, _IDLE_SECONDS)
            self._idle -= 1
            return self._tasks.popleft() if self._tasks else None


_threads = _Threads()


def run(task: Task) -> None:
    """Run a task, which handles its own exceptions, on a thread on which it may wait."""
    _threads.run(task)


def _finish() -> None:
    if _threads.finish(min(SILENT_SECONDS, _END_SECONDS)):
        return
    left = max(_END_SECONDS - SILENT_SECONDS, 0.0)
    text = f"a callback of a future still runs; the process waits for it, for at most {left:g} s more"
    log.warning(text)
    if not _threads.finish(left):
        text = f"a callback of a future still runs after {_END_SECONDS:g} s; the process ends without it"
        log.warning(text)


def _start_again() -> None:
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_start_again)
at_process_end(_finish, priority=0)  # after the groups have left: that ends the calls for which callbacks wait
