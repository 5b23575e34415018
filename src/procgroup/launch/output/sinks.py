"""Merge the ranks' output so that every line stays whole and begins with its rank.

Words: a *line* ends with a newline. A *live line* has none yet and is shown already, because it redraws
itself with carriage returns, as a progress bar does. A *sink* is an output of the launcher (its stdout or
stderr); when both are the same file they are one sink, because two would interleave parts of lines::

    rank 0 pipe ──> LinePrefixer ──┐
    rank 1 pipe ──> LinePrefixer ──┼──> Sink ──> stdout          "[rank 1] step 3\\n"
    rank 2 pipe ──> LinePrefixer ──┘

Bytes are never decoded, so incomplete characters and binary data pass unchanged. At most one rank owns the live line of
a sink; another rank's line ends the live line, which continues on a new line.

A terminal may have a *status line* of the launcher: it is erased before other output and drawn again after it, unless a
live line is there.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from procgroup.launch.deadlines import FLUSH_SECONDS

MAX_LINE_BYTES = 1 << 20
"""A longer line is shown as several lines, so that one rank cannot fill the launcher's memory."""

_REDRAW = re.compile(rb"\r(?=[^\r\n])")
_ERASE_LINE = b"\r\x1b[K"
# A pipe that poll() reports as writable takes this many bytes without blocking (PIPE_BUF on Linux).
_WRITE_BYTES = 4096


class Sink:
    """One output of the launcher. Output is kept until ``write_some`` can write it.

    A sink is ``broken`` when its reader has closed it; then its sources are closed, which ends their writers. A sink
    that ``has_failed``, as on a full disk, calls ``on_failure`` with the error and drops all further output; the job
    goes on, as it does when log files fail.
    """

    def __init__(self, descriptor: int, on_failure: Callable[[OSError], None] | None = None) -> None:
        self.descriptor = descriptor
        self.broken: bool = False
        self.has_failed: bool = False
        self._on_failure = on_failure
        self.is_terminal: bool = _is_terminal(descriptor)
        self._pending = bytearray()
        self._live_owner: LinePrefixer | None = None
        self._status = b""
        self._status_is_drawn = False

    @property
    def pending(self) -> int:
        """The number of bytes to be written."""
        return len(self._pending)

    def put_lines(self, owner: LinePrefixer | None, text: bytes) -> None:
        """Write whole lines, after ending a live line of another owner."""
        if self._live_owner is not None and self._live_owner is not owner:
            self._put(_ERASE_LINE if self.is_terminal else b"\n")
            self._live_owner.interrupt()
        self._live_owner = None
        self._put(text)
        self._draw_status()

    def put_live(self, owner: LinePrefixer, text: bytes) -> bool:
        """Write part of a live line, unless another owner has the live line; return whether it was written."""
        if self._live_owner not in (None, owner):
            return False
        self._live_owner = owner
        self._put(text)
        return True

    def show_status(self, text: str) -> None:
        """Set the status line, or remove it with an empty text; does nothing where the sink is not a terminal."""
        status = _fitting(text, self.descriptor).encode(errors="replace") if self.is_terminal else b""
        if status != self._status:
            self._status = status
            self._put(b"")
            self._draw_status()

    def write_some(self) -> None:
        """Write as much as is possible without blocking; call it when the descriptor is ready."""
        try:
            written = os.write(self.descriptor, self._pending[:_WRITE_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self._pending.clear()
            self._fail(error)
        else:
            del self._pending[:written]

    def _fail(self, error: OSError) -> None:
        if error.errno in (errno.EPIPE, errno.ECONNRESET) or self.is_terminal:
            self.broken = True
            return
        self.has_failed = True
        if self._on_failure is not None:
            self._on_failure(error)

    def _put(self, text: bytes) -> None:
        if not (self.broken or self.has_failed):
            self._pending += _ERASE_LINE + text if self._status_is_drawn else text
            self._status_is_drawn = False

    def _draw_status(self) -> None:
        if self._status and self._live_owner is None and not self.broken:
            self._pending += self._status
            self._status_is_drawn = True


class ClosedSink(Sink):
    """A closed output of the launcher: output is dropped, and the ranks may go on writing."""

    def __init__(self) -> None:
        super().__init__(-1)

    def _put(self, text: bytes) -> None:
        pass


class LinePrefixer:
    """Writes one stream of a rank as prefixed lines to a sink."""

    def __init__(self, prefix: str, sink: Sink, own_prefix: str = "") -> None:
        """``own_prefix`` is a prefix that the rank itself writes before some lines; it is removed."""
        self.sink = sink
        self._prefix = prefix.encode()
        self._own_prefix = (
            re.compile(b"^" + re.escape(own_prefix.encode()) + b" ?", re.MULTILINE) if own_prefix else None
        )
        self._partial = bytearray()
        # Whether a live line is shown, and whether its last character is a carriage return.
        self._live = False
        self._returned = False

    def feed(self, data: bytes) -> None:
        """Take data of the rank; write the lines that are complete."""
        self._partial += data
        end = self._partial.rfind(b"\n") + 1
        if end:
            self._show_lines(bytes(self._partial[:end]))
            del self._partial[:end]
        if self._live or b"\r" in self._partial:
            self._show_live()
        while len(self._partial) > MAX_LINE_BYTES:
            cut = _character_boundary(self._partial, MAX_LINE_BYTES)
            self._show_lines(bytes(self._partial[:cut]) + b"\n")
            del self._partial[:cut]

    def finish(self) -> None:
        """Write a last line that has no newline; the stream has ended."""
        if self._partial or self._live:
            self._show_lines(bytes(self._partial) + b"\n")
            self._partial.clear()

    def interrupt(self) -> None:
        """Forget the live line, which another rank's lines have ended."""
        self._live = self._returned = False

    def _show_lines(self, text: bytes) -> None:
        """Write whole lines, the last newline included."""
        text = self._without_own_prefix(text)
        body = self._redrawn(text[:-1]).replace(b"\n", b"\n" + self._prefix)
        self.sink.put_lines(self, self._opening(text) + body + b"\n")
        self._live = self._returned = False

    def _show_live(self) -> None:
        text = bytes(self._partial)
        if text and self.sink.put_live(self, self._opening(text) + self._redrawn(text)):
            self._partial.clear()
            self._live, self._returned = True, text.endswith(b"\r")

    def _without_own_prefix(self, text: bytes) -> bytes:
        return text if self._own_prefix is None else self._own_prefix.sub(b"", text)

    def _opening(self, text: bytes) -> bytes:
        """Return the prefix, or b"" where the text continues a live line or its redrawing adds the prefix."""
        continues = self._live and not (self._returned and text[:1] not in (b"\r", b"\n"))
        return b"" if continues or _REDRAW.match(text) else self._prefix

    def _redrawn(self, text: bytes) -> bytes:
        """Repeat the prefix after each carriage return that overwrites it."""
        return _REDRAW.sub(lambda match: b"\r" + self._prefix, text) if b"\r" in text else text


def redraws(text: bytes) -> bool:
    """Return whether a text overwrites its own line, as a progress bar does."""
    return _REDRAW.search(text) is not None


def open_sinks() -> tuple[Sink, Sink]:
    """Return the sinks of this process's stdout and stderr: the same sink twice when both are the same file.

    An output that was closed when the interpreter started stays closed, because its descriptor may now be another
    file's. A failure of stdout is reported on stderr.
    """
    out = None if sys.__stdout__ is None else _file_of(1)
    err = None if sys.__stderr__ is None else _file_of(2)
    if out is not None and out == err:
        both = Sink(1)
        return both, both
    stderr = Sink(2) if err else ClosedSink()

    def report(error: OSError) -> None:
        stderr.put_lines(None, f"procgroup run: cannot write to stdout: {error.strerror}\n".encode())

    return Sink(1, report) if out else ClosedSink(), stderr


def say(text: str) -> None:
    """Print one line of the launcher on stderr, before there are sinks."""
    with suppress(OSError):  # a full disk; the exit status still shows a failure
        print(f"procgroup run: {text}", file=sys.stderr, flush=True)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Return the device and inode of a descriptor; None where it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _fitting(text: str, descriptor: int) -> str:
    """Cut a text to one line of the terminal, because a wrapped line cannot be erased."""
    try:
        columns = os.get_terminal_size(descriptor).columns
    except OSError:
        columns = 0
    return text[: (columns or 80) - 1]


def _character_boundary(text: bytearray, end: int) -> int:
    """Return the last place at or before ``end`` that does not split a UTF-8 character."""
    for cut in range(end, end - 4, -1):
        if text[cut] & 0xC0 != 0x80:
            return cut
    return end


_PENDING_BYTES = 1 << 20
_READ_BYTES = 64 * 1024
# The largest content of a pipe whose writer has ended (the largest size that an ordinary user may set).
_PIPE_BYTES = 1 << 20
_LONGEST_POLL_SECONDS = 86400.0  # poll() takes a number of milliseconds of 32 bits


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
            data = os.read(self.descriptor, _READ_BYTES)
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
            taken += _READ_BYTES
        self.close()


def move_bytes(
    sources: Iterable[PipeReader],
    sinks: Iterable[Sink],
    wake: Iterable[int],
    timeout: float | None,
    others: Mapping[int, Callable[[], object]] | None = None,
) -> None:
    """Wait until a source can be read or a sink written, at most ``timeout`` seconds; then read and write.

    A readable ``wake`` descriptor ends the wait; a readable descriptor of ``others`` calls its function. Sources of a
    sink with too much pending output are not read; those of a broken sink are closed, so that their writers get an
    error.
    """
    with selectors.PollSelector() as selector:
        for descriptor in wake:
            selector.register(descriptor, selectors.EVENT_READ)
        for descriptor, act in (others or {}).items():
            selector.register(descriptor, selectors.EVENT_READ, act)
        for sink in set(sinks):
            if sink.pending:
                selector.register(sink.descriptor, selectors.EVENT_WRITE, sink.write_some)
        for source in sources:
            if source.sink.broken:
                source.close()
            elif source.open and source.sink.pending < _PENDING_BYTES:
                selector.register(source.descriptor, selectors.EVENT_READ, source.read_some)
        for key, _ in selector.select(None if timeout is None else min(timeout, _LONGEST_POLL_SECONDS)):
            if key.data is not None:
                key.data()


def flush(sinks: Iterable[Sink], move: Callable[[float], None], was_interrupted: Callable[[], bool]) -> None:
    """Call ``move(seconds)`` until all output is written, at most FLUSH_SECONDS once a signal has come."""
    began = time.monotonic()
    while any(sink.pending for sink in sinks):
        if was_interrupted() and time.monotonic() - began > FLUSH_SECONDS:
            return
        move(FLUSH_SECONDS)
