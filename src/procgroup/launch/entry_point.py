"""What every command does first and last: it has standard streams, and Ctrl-C ends it without a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def run_command(command: Callable[[], int]) -> int:
    """Run a command, which imports what it needs only then; return its exit status, 130 after Ctrl-C."""
    open_standard_streams()
    try:
        return command()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def open_standard_streams() -> None:
    """Open /dev/null where descriptors 0, 1 and 2 are closed.

    A pipe or socket would get such a number, and the text that programs write to their standard streams.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, and so this one
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))
