"""Shorten the traceback that Python prints when Ctrl-C ends it: N ranks print N lines."""

from __future__ import annotations

import re

from procgroup.launch.failures.evidence import RANK_PREFIX, TRACEBACK_HEADER

_HEADER = TRACEBACK_HEADER.encode()
_FRAME = re.compile(r'  File "([^"]+)", line (\d+)')
_HELD_BYTES = 64 * 1024


class InterruptFilter:
    """Passes a rank's stderr on, but holds a traceback back until the rank has ended.

    While ``active`` is False it passes everything; it is set once an interrupt has been sent to the rank.
    """

    def __init__(self) -> None:
        self.active = False
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take written data; return the part that may be shown now."""
        if not self.active:
            return data
        self._held += data
        start = self._held.find(_HEADER)
        if start < 0:
            start = self._held.rfind(b"\n") + 1
        if len(self._held) - start > _HELD_BYTES:
            start = len(self._held)
        shown, self._held = self._held[:start], self._held[start:]
        return shown

    def finish(self) -> bytes:
        """Return the data held back: an uncaught KeyboardInterrupt as one line, other text unchanged."""
        held, self._held = self._held, b""
        lines = RANK_PREFIX.sub("", held.decode(errors="replace")).rstrip().splitlines()
        if not lines or lines[0] != TRACEBACK_HEADER or not lines[-1].startswith("KeyboardInterrupt"):
            return held
        frames = [match.groups() for match in map(_FRAME.match, lines) if match]
        place = " at {}, line {}".format(*frames[-1]) if frames else ""
        return f"KeyboardInterrupt{place}\n".encode()
