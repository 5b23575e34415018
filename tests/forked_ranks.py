"""What processes need that fork ranks: the ranks end with them, run as programs of their own, and leave nothing."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import two_hosts

LEFTOVER_SECONDS = 1.0
"""How long a process may go on that a rank has started, after the end of that rank."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make what the children of this process leave running its own children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def be_a_program(variables: Mapping[str, str], output: Path, namespace: str = "") -> None:
    """Give this forked process the variables, output, signals and host of one that is started by itself.

    SIGUSR2 makes it print its stacks.
    """
    if namespace:
        two_hosts.enter(namespace)
    os.environ.clear()
    os.environ.update(variables)
    for descriptors, path, flags in (
        ([0], os.devnull, os.O_RDONLY),
        ([1, 2], output, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have let its background ignore it
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)


def kill_leftovers() -> list[str]:
    """Wait a second for the children of this process; kill those that still run, and return their commands."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
    left = []
    for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        left.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") or str(pid))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return left
