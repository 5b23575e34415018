"""The main function of a process that ``spawn`` starts: end with the caller, run the function, report its exception.

The modules for the report are imported before the function runs, because a process without free file descriptors or
memory cannot import any more. Nothing else is imported, so that children start fast.

The report is text, so an exception that cannot be pickled is reported, too, and reading a report executes no code. It
goes through a pipe, of which no file is left when all processes are killed. It is short enough to be written at once,
so neither end ever waits for the other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from procgroup import errors  # noqa: F401 - exit_reason needs it
from procgroup.process.error_file import ErrorRecord, record_of
from procgroup.process.exit_reason import Origin
from procgroup.process.process_end import note_exception

_PR_SET_PDEATHSIG = 1

MAX_TEXT_BYTES = 7 * 1024
"""The largest message, and the largest traceback, that is sent: multiprocessing writes 16 KiB at once."""


class ChildReport(NamedTuple):
    """An exception of a child; ``time`` is in seconds of ``time.monotonic``."""

    time: float
    record: ErrorRecord


def run(
    fn: Callable[..., object],
    index: int,
    args: tuple[Any, ...],
    report: Connection,
    parent_pid: int | None,
    environment: Mapping[str, str],
) -> None:
    """Call ``fn(index, *args)``; send an exception through ``report`` and exit with status 1.

    ``parent_pid`` is None where the parent is a fork server.
    """
    try:
        _die_with_caller(parent_pid)
        os.environ.update(environment)
        fn(index, *args)
    except KeyboardInterrupt:
        pass  # the parent ends all its children, and reports the interrupt once
    except SystemExit:
        raise
    except BaseException as error:
        note_exception(error)
        send_report(report, error)
        raise SystemExit(1) from None


def _die_with_caller(parent_pid: int | None) -> None:
    """Let the kernel end this process with the one that called ``spawn``: its parent, or a fork server's client."""
    caller = multiprocessing.parent_process()
    if parent_pid is not None:
        die_with_parent(parent_pid)
    elif caller is not None:
        die_with_writer(caller.sentinel)


def send_report(connection: Connection, error: BaseException) -> None:
    """Send the report of an exception; long texts are cut in the middle."""
    raised_at = time.monotonic()
    record = record_of(error, MAX_TEXT_BYTES)
    kind, peer = record.origin or Origin()
    texts = (str(raised_at), record.message, record.traceback, kind, "" if peer is None else str(peer))
    connection.send_bytes(b"\0".join(text.replace("\0", "?").encode(errors="replace") for text in texts))


def receive_report(connection: Connection) -> ChildReport | None:
    """Return the child's report, or None where none has arrived."""
    try:
        if not connection.poll():
            return None
        raised_at, message, traceback, kind, peer = connection.recv_bytes().decode().split("\0")
        origin = Origin(kind, int(peer) if peer else None)
        return ChildReport(float(raised_at), ErrorRecord(message, traceback, origin=origin))
    except (EOFError, OSError, ValueError):
        return None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; if that has happened already, end now.

    The kernel sends the signal when the *thread* that started the child ends, so children are started from a thread
    that lives as long as its process. The request is made before the look at the parent's pid: a parent that ended
    before the request is seen by the look, one that ends after it by the kernel.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_writer(pipe: int) -> None:
    """Have the kernel kill this process when a pipe has no writer left; if it has none already, end now.

    For a process that ends with another process than its parent. Read everything in the pipe first: data that is
    written later kills this process, too.
    """
    import fcntl
    import select

    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | fcntl.FASYNC)
    watched = select.poll()
    watched.register(pipe, select.POLLIN)
    if watched.poll(0):
        os.kill(os.getpid(), signal.SIGKILL)
