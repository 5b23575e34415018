"""Tie a process's life to that of the process that started it.

Also a program, run before a rank's own program, in the process that becomes the rank::

    python -I -S die_with_parent.py PARENT_PID CPUS COMMAND ARGUMENT...

CPUS are the numbers of those CPUs that the rank may run on, with commas between them, or "" for all.

The kernel sends the signal when the *thread* that started the child ends, so children are started from a
thread that lives as long as its process. The request survives exec, so the command need not know of it. It
is made before the look at the parent's pid: a parent that died before the request is seen by the look, one
that dies after it by the kernel. Doing it in a fresh interpreter, not between fork and exec, means that no
Python code runs in a copy of a process whose other threads hold locks.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; if that has happened already, end now.

    Does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_writer(pipe: int) -> None:
    """Have the kernel kill this process when the last writer of a pipe is gone; if it is gone already, end now.

    For a process whose parent is not the one to follow. All that was written must have been read: what comes
    later kills as well. Does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return
    import fcntl
    import select

    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | fcntl.FASYNC)
    watched = select.poll()
    watched.register(pipe, select.POLLIN)
    if watched.poll(0):
        os.kill(os.getpid(), signal.SIGKILL)


def bind_to_cpus(cpus: str) -> None:
    """Bind this process, and those it starts, to CPUs; say so on stderr and go on where the system refuses that."""
    try:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    except OSError as error:
        print(f"procgroup run: cannot bind this rank to CPUs {cpus}: {error.strerror}; not bound", file=sys.stderr)


def _main() -> None:
    parent_pid, cpus, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    die_with_parent(parent_pid)
    if cpus:
        bind_to_cpus(cpus)
    # Python ignores SIGPIPE and SIGXFSZ, and a shell's background jobs ignore SIGINT; exec hands that on.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    _main()
