"""The signal by which a thread of this process writes its Python stack, for the other ranks' reports.

The stack is taken when another rank has waited for this one for some seconds; until then nothing is sent. Python's
faulthandler writes it, in the thread itself, so that it works while the thread sleeps, computes, or is in C code that
holds the interpreter's lock. A system call of the thread is restarted; those that the kernel cannot restart end with
EINTR, which Python handles, and C code should. Frames of procgroup are left out: they say nothing of the program.
See native/runtime/stack_sampler.hpp.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

from procgroup import _native
from procgroup.process import environ, state


def install() -> None:
    """Give a real-time signal that nobody uses to the stacks of this process, once."""
    if state.stack_signal_process:
        return
    number = environ.PROCGROUP_STACK_SIGNAL.get()
    if number is None:
        number = _free_signal()
    if not number:
        return
    state.stack_signal_process = os.getpid()
    file = os.memfd_create("procgroup-stack", os.MFD_CLOEXEC)
    faulthandler.register(number, file=file, all_threads=False)
    _native.install_stack_signal(number, file, f"{Path(__file__).parents[1]}/")


def _free_signal() -> int | None:
    # From the highest: programs and libraries that choose one begin at the lowest.
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    return None
