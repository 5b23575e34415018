"""Uncaught exceptions: the other ranks are told at once, and every line is prefixed with the rank.

The prefix tells mixed outputs apart. The exception that ends a process is known here before the interpreter waits for
other threads and runs what is registered for its exit.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from types import TracebackType
from typing import Any

from procgroup import process_end

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
ThreadHook = Callable[[threading.ExceptHookArgs], Any]


class UncaughtHook:
    """An excepthook that prints what the former hook prints, and then calls ``tell`` when the process ends with that.

    With a ``rank`` each printed line stands behind "[rank3]: ".
    """

    def __init__(self, rank: int | None, former: Hook, tell: Callable[[BaseException], None] | None) -> None:
        self.rank = rank
        self.former = former
        self.tell = tell

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            self._print(kind, error, traceback)
        finally:
            if self.tell is not None and _ends_the_process():
                self.tell(error)

    def _print(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if self.rank is None or _is_prefixed_by_torch():
            self.former(kind, error, traceback)
            return
        with redirect_stderr(io.StringIO()) as text:
            self.former(kind, error, traceback)
        lines = text.getvalue().splitlines(keepends=True)
        sys.stderr.write("".join(f"[rank{self.rank}]: {line}" if line.strip() else line for line in lines))


class UncaughtInThread:
    """A threading.excepthook that remembers what has ended a thread: the program's main part may have run there."""

    def __init__(self, former: ThreadHook) -> None:
        self.former = former

    def __call__(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            process_end.note_thread_exception(arguments.exc_value)
        self.former(arguments)


_installed: list[UncaughtHook] = []


def install(rank: int | None, tell: Callable[[BaseException], None]) -> None:
    """Call ``tell`` with the exception that ends this process, from now on; with a rank, prefix what is printed."""
    remove()
    hook = UncaughtHook(rank, sys.excepthook, tell)
    _installed.append(hook)
    sys.excepthook = hook
    if not isinstance(threading.excepthook, UncaughtInThread):
        threading.excepthook = UncaughtInThread(threading.excepthook)


def is_installed() -> bool:
    """Tell whether ``install`` was called, and ``remove`` not since."""
    return bool(_installed)


def remove() -> None:
    """Put the former hooks back; where somebody has put others in front of them, these go on without ours."""
    for hook in _installed:
        hook.rank = hook.tell = None
    _installed.clear()
    while isinstance(sys.excepthook, UncaughtHook):
        sys.excepthook = sys.excepthook.former
    if isinstance(threading.excepthook, UncaughtInThread):
        threading.excepthook = threading.excepthook.former


def _ends_the_process() -> bool:
    """Tell whether the interpreter itself has called sys.excepthook for the main program, which is over then.

    Libraries call it too, for exceptions of callbacks after which the program goes on; so does an interactive prompt.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or hasattr(sys, "ps1") or sys.flags.interactive:
        return False
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    hook = sys.excepthook
    return frame.f_code is getattr(hook, "__code__", getattr(type(hook).__call__, "__code__", None))


def _is_prefixed_by_torch() -> bool:
    """Tell whether torch.distributed's own hook, which prefixes every line too, has called ours."""
    return (getattr(sys.excepthook, "__module__", None) or "").startswith("torch.distributed")
