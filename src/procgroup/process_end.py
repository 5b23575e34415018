"""What is to be done when this process ends, also where multiprocessing has started it.

Before Python 3.13 a process that multiprocessing forks runs no atexit functions, and since then only those that it has
registered itself. It runs multiprocessing's own finalizers always.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack

_functions: dict[Callable[[], None], int] = {}
_registered_in = 0
"""The process that will run them. A forked child has the variable too, but not always the registration."""


def at_process_end(function: Callable[[], None], priority: int) -> None:
    """Call ``function`` once when this process ends in order, those of a higher priority first."""
    global _registered_in
    _functions[function] = priority
    if _registered_in == os.getpid():
        return
    _registered_in = os.getpid()
    atexit.unregister(_run)
    atexit.register(_run)
    # A child of multiprocessing has imported it.
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _run, exitpriority=0)


def ends_with_an_exception() -> bool:
    """Return whether what ends this process is an exception, as far as can be known; sys.exit is none."""
    raised = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return raised is not None and not isinstance(raised, SystemExit)


def _run() -> None:
    with ExitStack() as stack:  # all of them, also when one raises
        for function in sorted(_functions, key=lambda function: _functions[function]):
            stack.callback(function)
        _functions.clear()
