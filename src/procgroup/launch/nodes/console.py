"""The launcher's outputs: what the ranks write, in whole lines, and the launcher's own lines between them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from procgroup.launch.output import byte_mover
from procgroup.launch.output.job_output import JobOutput
from procgroup.launch.ranks.rank_process import Stream


class Console:
    """Moves bytes from the ranks' pipes to the launcher's outputs."""

    def __init__(self, output: JobOutput) -> None:
        self.output = output

    def say(self, text: str) -> None:
        """Print one line of the launcher on stderr."""
        self.output.say(text)

    def move_bytes(self, streams: Sequence[Stream], wake: Sequence[int], timeout: float | None) -> None:
        """Read from the ranks and write to the outputs as soon as possible; a readable ``wake`` ends the wait."""
        progress = self.output.progress
        reports = {} if progress is None else {progress.descriptor: self.output.take_progress}
        byte_mover.move_bytes(streams, self.output.sinks, wake, self._sooner(timeout), reports)
        self.output.tick()

    def flush(self, streams: Sequence[Stream], wake: int, was_interrupted: Callable[[], bool]) -> None:
        """Write all pending output; return early once a signal has come and the output is not read."""
        self.output.finish()
        byte_mover.flush(self.output.sinks, lambda seconds: self.move_bytes(streams, [wake], seconds), was_interrupted)

    def _sooner(self, timeout: float | None) -> float | None:
        """Return the timeout, or the time until the output has a line to show if that is shorter."""
        due = self.output.due
        if due is None:
            return timeout
        left = max(0.0, due - time.monotonic())
        return left if timeout is None else min(left, timeout)


def say(text: str) -> None:
    """Print one line of the launcher on stderr, before there is a console."""
    with suppress(OSError):  # a full disk; the exit status still shows a failure
        print(f"procgroup run: {text}", file=sys.stderr, flush=True)
