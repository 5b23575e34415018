"""MPI on this process, by mpi4py: its start, and a broadcast to all tasks of the launcher, both with time limits.

MPI_Init waits for all processes that mpiexec has started. So it runs in a thread of its own, by ctypes, because mpi4py
keeps the interpreter's lock meanwhile.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from procgroup.errors import DistBackendError

_TEXT_BYTES = 4096
_SHORTEST_PAUSE_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.01


_starting: list[InThread] = []


def is_loaded() -> bool:
    """Return whether this process has loaded an MPI library by mpi4py; it may have been started or not."""
    return sys.modules.get("mpi4py.MPI") is not None


def is_started() -> bool:
    """Start MPI, if nobody has; return whether it runs. Call it again until it does.

    Raises DistBackendError when MPI could not be started.
    """
    from mpi4py import MPI

    if MPI.Is_initialized() and not _starting:
        return True
    if not _starting:
        library, level = ctypes.CDLL(MPI.__file__), ctypes.c_int()
        start = library.MPI_Init_thread
        _starting.append(InThread(lambda: start(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(level)), "pg-mpi-start"))
    if _starting[0].is_alive():
        return False
    if (code := _starting[0].result()) != 0:
        raise DistBackendError(f"MPI_Init_thread has failed on this process with code {code}.")
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    return True


def broadcast(text: str | None, seconds: float) -> str:
    """Broadcast the text of rank 0; the other tasks pass None. All tasks of the launcher call it.

    Raises TimeoutError when some task has not called it in time.
    """
    from mpi4py import MPI

    deadline = time.monotonic() + seconds
    _wait(is_started, deadline)
    buffer = bytearray((text or "").encode().ljust(_TEXT_BYTES, b"\0"))
    request = MPI.COMM_WORLD.Ibcast(buffer, 0)
    _wait(request.Test, deadline)
    return buffer.rstrip(b"\0").decode()


def _wait(is_done: Callable[[], bool], deadline: float) -> None:
    pause = _SHORTEST_PAUSE_SECONDS
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError("MPI has not brought the tasks together in time")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class InThread(threading.Thread):
    """Calls a function, from now on. The process may end before the function does."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # raised where it is waited for
            self._error = error

    def result(self) -> Any:
        """Return what the function has returned; raise what it has raised. Call it when the thread has ended."""
        if self._error is not None:
            raise self._error
        return self._result
