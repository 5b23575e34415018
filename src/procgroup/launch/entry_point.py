"""Run a command with open standard streams; end it without a traceback on Ctrl-C, or when nobody reads its output."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit status: 130 after Ctrl-C, 141 when the reader of its output has ended, as head.

    The command imports its modules itself.
    """
    open_standard_streams()
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        is_unread = bool(poll.poll(0))  # a pipe or socket whose other end is closed
        if not is_unread:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest there at its end
        return 128 + signal.SIGPIPE


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
