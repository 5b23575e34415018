"""The launcher's outputs: what the ranks write, in whole lines, and the launcher's own lines between them."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable, Sequence

from procgroup.launch.output.job_output import JobOutput
from procgroup.launch.output.sinks import Sink
from procgroup.launch.ranks.rank_process import Stream

FLUSH_SECONDS = 1.0
"""How long, after a signal, to try to write what the reader of the output does not take."""

_PENDING_BYTES = 1 << 20
_LONGEST_POLL_SECONDS = 86400.0  # poll() takes a number of milliseconds of 32 bits


class Console:
    """Moves bytes from the ranks' pipes to the launcher's outputs, and wakes for other descriptors meanwhile."""

    def __init__(self, output: JobOutput) -> None:
        self.output = output

    def say(self, text: str) -> None:
        """Show one line of the launcher's own on stderr."""
        self.output.say(text)

    def move_bytes(self, streams: Sequence[Stream], wake: Sequence[int], timeout: float | None) -> None:
        """Read what ranks wrote and write what fits, once something can be; a byte at a ``wake`` descriptor ends it.

        While an output is behind, its readers wait.
        """
        with selectors.PollSelector() as selector:
            for descriptor in wake:
                selector.register(descriptor, selectors.EVENT_READ)
            if self.output.progress is not None:
                selector.register(self.output.progress.descriptor, selectors.EVENT_READ, self.output)
            for sink in set(self.output.sinks):
                if sink.pending:
                    selector.register(sink.descriptor, selectors.EVENT_WRITE, sink)
            for stream in _still_open(streams):
                if stream.sink.pending < _PENDING_BYTES:
                    selector.register(stream.descriptor, selectors.EVENT_READ, stream)
            for key, _ in selector.select(self._sooner(timeout)):
                _move(key.data)
        self.output.tick()

    def flush(self, streams: Sequence[Stream], wake: int, was_interrupted: Callable[[], bool]) -> None:
        """Write what is still to be written; somebody who has sent a signal need not wait for it long."""
        self.output.finish()
        began = time.monotonic()
        while any(sink.pending for sink in self.output.sinks):
            if was_interrupted() and time.monotonic() - began > FLUSH_SECONDS:
                return
            self.move_bytes(streams, [wake], FLUSH_SECONDS)

    def _sooner(self, timeout: float | None) -> float | None:
        """Return the timeout, or the time until the output has something to show; no more than poll() takes."""
        due = self.output.due
        left = _LONGEST_POLL_SECONDS if due is None else max(0.0, due - time.monotonic())
        if timeout is None:
            return None if due is None else left
        return min(left, timeout)


def _move(ready: object) -> None:
    if isinstance(ready, Stream):
        ready.read_some()
    elif isinstance(ready, Sink):
        ready.write_some()
    elif isinstance(ready, JobOutput):
        ready.take_progress()


def _still_open(streams: Sequence[Stream]) -> list[Stream]:
    """Return the open streams; close those whose output is gone, so that its ranks learn it from their writes."""
    for stream in streams:
        if stream.open and stream.sink.broken:
            stream.close()
    return [stream for stream in streams if stream.open]


def say(text: str) -> None:
    """Write one line of the launcher's own to stderr, before there is a console."""
    print(f"procgroup run: {text}", file=sys.stderr, flush=True)
