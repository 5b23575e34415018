"""Let the kernel kill a process when the process that started it ends.

The kernel sends the signal when the *thread* that started the child ends, so children are started from a
thread that lives as long as its process. The request is made before the look at the parent's pid: a parent
that died before the request is seen by the look, one that dies after it by the kernel.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from procgroup import _native

PR_SET_PDEATHSIG = 1


def dying_with_this_process(command: Iterable[str], cpus: Iterable[int] = ()) -> list[str]:
    """Return the command that runs ``command`` in a child that the kernel kills when this process ends.

    ``cpus`` are those that the child may run on, by default all; where the system refuses them, the child says so on
    stderr and goes on. See native/launch/die_with_parent.cpp.
    """
    program = Path(_native.__file__).with_name("die_with_parent")
    return [str(program), str(os.getpid()), ",".join(map(str, sorted(cpus))), *command]


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; if that has happened already, end now."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
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
