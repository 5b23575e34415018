"""Run a command with open standard streams, and end it on Ctrl-C without a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit status, 130 after Ctrl-C. The command imports its modules itself."""
    open_standard_streams()
    try:
        return command()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def open_standard_streams() -> None:
    """Open /dev/null where descriptors 0, 1 and 2 are closed.

    Otherwise a pipe or socket would get such a number, and with it the output of the standard streams.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, and so this one
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))
