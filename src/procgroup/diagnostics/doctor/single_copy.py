"""Whether one process of this user may read another's memory by process_vm_readv, as ranks do for large arrays.

Two processes are started, because the kernel's rule may depend on who started whom: two ranks are children of one
launcher, and none of them is an ancestor of the other. This file is also their program::

    python single_copy.py owner                  prints its process id and an address, then waits for the end of stdin
    python single_copy.py reader PID ADDRESS     reads there; prints what the kernel says
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

_SECONDS = 10
_TEXT = b"procgroup"
_PYTHON = (sys.executable, "-I", "-S", __file__)


def problem() -> str:
    """Return why a process may not read the memory of another one; "" where it may."""
    try:
        with subprocess.Popen(
            [*_PYTHON, "owner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as owner:
            try:
                return _read_from(owner)
            finally:
                owner.kill()
    except (OSError, subprocess.SubprocessError) as error:
        return f"it could not be tried: {error}"


def _read_from(owner: subprocess.Popen[str]) -> str:
    assert owner.stdout is not None
    place = owner.stdout.readline().split()
    done = subprocess.run(
        [*_PYTHON, "reader", *place], capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
    )
    return done.stdout.strip() if done.returncode == 0 else f"the reader ended with status {done.returncode}"


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _own() -> None:
    text = ctypes.create_string_buffer(_TEXT)
    print(os.getpid(), ctypes.addressof(text), flush=True)
    sys.stdin.read()


def _read(pid: int, address: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        print("this system has no process_vm_readv")
        return
    copy = ctypes.create_string_buffer(len(_TEXT))
    here = _IoVector(ctypes.addressof(copy), len(_TEXT))
    there = _IoVector(address, len(_TEXT))
    one = ctypes.c_ulong(1)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    size = libc.process_vm_readv(pid, ctypes.byref(here), one, ctypes.byref(there), one, ctypes.c_ulong(0))
    if size < 0:
        print(os.strerror(ctypes.get_errno()))
    elif copy.raw != _TEXT:
        print("another text was read")


if __name__ == "__main__":
    if sys.argv[1] == "owner":
        _own()
    else:
        _read(int(sys.argv[2]), int(sys.argv[3]))
