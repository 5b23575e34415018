"""What the ranks write, put together so that every line stays whole and says whose it is.

Words: a *line* ends with a newline. A *live line* has none yet and is shown already, because it redraws
itself with carriage returns, as a progress bar does. A *sink* is an output of the launcher (its stdout or
stderr); when both are one file they are one sink, since two could tear each other's lines::

    rank 0 pipe ──> LinePrefixer ──┐
    rank 1 pipe ──> LinePrefixer ──┼──> Sink ──> stdout          "[rank 1] step 3\\n"
    rank 2 pipe ──> LinePrefixer ──┘

Bytes are never decoded, so text that is cut in the middle of a character, or is no text, passes unchanged.
At most one rank owns the live line of a sink. Another rank's line ends it first; it goes on below.

A sink that is a terminal may have a *status line*, the launcher's own: it is erased before anything else is shown and
drawn again below that, unless a live line stands there.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable

MAX_LINE_BYTES = 1 << 20
"""A longer line is shown as several lines, so that one rank cannot fill the launcher's memory."""

_REDRAW = re.compile(rb"\r(?=[^\r\n])")
_ERASE_LINE = b"\r\x1b[K"
# A pipe that reports room takes this many bytes without blocking (PIPE_BUF on Linux).
_WRITE_BYTES = 4096


class Sink:
    """One output of the launcher. What it is given is kept until ``write_some`` finds room for it.

    A sink is ``broken`` when its reader has gone away; its writers are to end then. One that ``has_failed``, as on a
    full disk, drops what it is given: its job goes on, as it does when its log files fail. ``on_failure`` is called
    with the error.
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
        """How many bytes wait to be written."""
        return len(self._pending)

    def put_lines(self, owner: LinePrefixer | None, text: bytes) -> None:
        """Show whole lines. A live line of another owner is ended first."""
        if self._live_owner is not None and self._live_owner is not owner:
            self._put(_ERASE_LINE if self.is_terminal else b"\n")
            self._live_owner.interrupt()
        self._live_owner = None
        self._put(text)
        self._draw_status()

    def put_live(self, owner: LinePrefixer, text: bytes) -> bool:
        """Show part of a live line, unless the live line is another owner's; return whether it was shown."""
        if self._live_owner not in (None, owner):
            return False
        self._live_owner = owner
        self._put(text)
        return True

    def show_status(self, text: str) -> None:
        """Set the status line, or take it away with an empty text; nothing happens where no terminal is."""
        status = _fitting(text, self.descriptor).encode(errors="replace") if self.is_terminal else b""
        if status != self._status:
            self._status = status
            self._put(b"")
            self._draw_status()

    def write_some(self) -> None:
        """Write what fits without blocking; to be called when the descriptor is ready."""
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
    """Stands for an output that is closed: what it is given is dropped, and the ranks may go on to write."""

    def __init__(self) -> None:
        super().__init__(-1)

    def _put(self, text: bytes) -> None:
        pass


class LinePrefixer:
    """Turns what one rank writes on one stream into prefixed lines on a sink."""

    def __init__(self, prefix: str, sink: Sink, own_prefix: str = "") -> None:
        """``own_prefix`` is what the rank itself puts before some lines, which would say the same twice."""
        self.sink = sink
        self._prefix = prefix.encode()
        self._own_prefix = re.compile(b"^" + re.escape(own_prefix.encode()), re.MULTILINE) if own_prefix else None
        self._partial = bytearray()
        # Of a live line: whether one is shown, and whether its cursor stands behind a carriage return.
        self._live = False
        self._returned = False

    def feed(self, data: bytes) -> None:
        """Take what the rank wrote; show what can be shown."""
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
        """Show a last line that has no newline; the rank writes no more."""
        if self._partial or self._live:
            self._show_lines(bytes(self._partial) + b"\n")
            self._partial.clear()

    def interrupt(self) -> None:
        """Learn that another rank's lines have ended this live line."""
        self._live = self._returned = False

    def _show_lines(self, text: bytes) -> None:
        """Show whole lines, the end of the last one included."""
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
        """Return the prefix unless the text goes on with a live line or brings a prefix of its own."""
        continues = self._live and not (self._returned and text[:1] not in (b"\r", b"\n"))
        return b"" if continues or _REDRAW.match(text) else self._prefix

    def _redrawn(self, text: bytes) -> bytes:
        """Repeat the prefix behind each carriage return that overwrites it."""
        return _REDRAW.sub(lambda match: b"\r" + self._prefix, text) if b"\r" in text else text


def redraws(text: bytes) -> bool:
    """Return whether a text overwrites its own line, as a progress bar does."""
    return _REDRAW.search(text) is not None


def open_sinks() -> tuple[Sink, Sink]:
    """Return the sinks of this process's stdout and stderr: one sink, twice, when both are the same file.

    One that was closed when the interpreter started stays closed: its descriptor may be another file's by now.
    A failure of stdout is reported on stderr.
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


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Return which file a descriptor is of; None where it is closed."""
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
    """Return as much of a text as one line of the terminal holds; a wrapped line could not be erased."""
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
