"""Ends groups when the process ends or forks, and installs the exit, fork and exception hooks for that.

At exit a group that was never destroyed leaves in order: calls that were issued have some time to complete. An
exception that ends the program ends the group at once, and the other ranks receive its type, text and line. A group
that is destroyed while an exception is handled, as in a ``finally`` clause, waits one second for issued calls, and then
sends the exception to the ranks that wait for this one. A forked child shares no connection with the other ranks: its
copies of the groups raise ForkedProcessError, and it sends nothing when it ends.

The excepthook receives the exception before the interpreter joins other threads and runs exit handlers. The hook also
prefixes each printed line with the rank, to tell mixed outputs apart.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from procgroup.errors import DistError
from procgroup.groups.engine import FLUSH_SECONDS
from procgroup.groups.group import ProcessGroup
from procgroup.process import exit_reason, log, process_end, state
from procgroup.process.environ import TORCHELASTIC_ERROR_FILE
from procgroup.process.exit_reason import ExitReason
from procgroup.rendezvous import hosting
from procgroup.stores.store import Store

# The time that issued calls have to complete if the group is destroyed while an exception is handled.
_FAILED_SECONDS = 1.0
# Exceptions that control the flow of a program; they do not mean that it failed.
_STEERING = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit)

_alive: dict[ProcessGroup, Store | None] = {}
_is_watching: list[bool] = []
# The exception that was being handled when a group was made, by its id(). It is not a failure of the group.
_handled_before: dict[ProcessGroup, int] = {}

# The groups that were made among the ranks of a default group, which end with it: oldest first. Ranks may be threads of
# one process, so no loop runs over a dictionary to which another rank may add.
_children: dict[ProcessGroup, dict[ProcessGroup, None]] = {}
# The default group of each group in ``_children``.
_worlds: dict[ProcessGroup, ProcessGroup] = {}

# A file descriptor kept for the record of a failure, and the modules that write it, in case no other one is left then.
_spare: list[int] = []

# A forked child must not run the destructors of what its parent uses.
_kept: list[tuple[ProcessGroup, Store | None]] = []


def watch(group: ProcessGroup, store: Store | None) -> None:
    """Look after a group, and the store if it is the group's own, from now on."""
    if not _is_watching:
        _is_watching.append(True)
        os.register_at_fork(after_in_child=_mark_forked)
    if TORCHELASTIC_ERROR_FILE.is_set() and not _spare:
        with suppress(OSError):
            _spare.append(os.open(os.devnull, os.O_RDONLY))
    process_end.at_process_end(
        _leave_all, priority=1
    )  # before the stores that this process hosts wait for their clients
    process_end.at_process_end(_end_after_the_cause, priority=-1)
    if not _installed:
        install_excepthook(None)
    _alive[group] = store
    _handled_before[group] = id(sys.exc_info()[1])


def adopt(group: ProcessGroup, world: ProcessGroup) -> None:
    """Look after a group that was made among the ranks of ``world``, and ends with it."""
    _alive[group] = None
    _handled_before[group] = _handled_before.get(world, 0)
    _children.setdefault(world, {})[group] = None
    _worlds[group] = world


def let_go(group: ProcessGroup) -> Store | None:
    """End the groups made from a group, stop watching it, and return its own store.

    The caller passes the group's successor to ``watch`` or ``adopt``.
    """
    for child in reversed(_children.pop(group, {})):
        _leave(child, None, 0.0)
    return _forget(group)


def leave(group: ProcessGroup, seconds: float | None = None) -> None:
    """End a group, after those that were made from it, and close its own store. Idempotent.

    Issued calls have ``seconds`` to complete. Then raises the error of an issued call if no call has raised it yet;
    while another exception is handled, it is printed instead.
    """
    reason = _reason_to_leave(group)
    if seconds is None:
        seconds = _FAILED_SECONDS if reason else FLUSH_SECONDS
    unraised = _leave(group, reason, seconds)
    if unraised is None:
        return
    if not reason:
        raise unraised
    _report(unraised)


def fail(group: ProcessGroup, error: BaseException) -> None:
    """Tell the other ranks that this exception ends this rank.

    All their calls fail at once. If another rank caused the exception, only the calls that wait for this rank fail.
    """
    reason = exit_reason.reason_of(error)
    is_own = reason.origin.kind == exit_reason.OWN and not isinstance(error, DistError)
    group.fail(reason, at_once=is_own)


def fail_all(error: BaseException) -> None:
    """Tell the other ranks of all groups that this exception ends this process."""
    for group in list(_alive):
        fail(group, error)


def _reason_to_leave(group: ProcessGroup) -> ExitReason | None:
    """Return the reason from the exception being handled; None without one."""
    error = sys.exc_info()[1]
    if error is None or isinstance(error, _STEERING) or id(error) == _handled_before.get(group):
        return None
    return exit_reason.reason_of(error)


def _leave(group: ProcessGroup, reason: ExitReason | None, flush: float) -> BaseException | None:
    """Return the error of a call that no call has raised."""
    unraised = None
    for child in reversed(_children.pop(group, {})):
        unraised = _leave(child, reason, flush) or unraised
    if (lost := group.lost()) is not None:
        process_end.note_lost(process_end.Lost(*lost))
    unraised = group.shutdown(reason, flush) or unraised
    log.debug(f"left group {group.group_name}", group.members[group.rank()])
    store = _forget(group)
    if store is not None:
        hosting.close_unless_hosted(store)
    return unraised


def _forget(group: ProcessGroup) -> Store | None:
    """Stop watching a group, and return its own store."""
    if (world := _worlds.pop(group, None)) is not None:
        _children.get(world, {}).pop(group, None)
    _handled_before.pop(group, None)
    return _alive.pop(group, None)


def _report(unraised: BaseException) -> None:
    log.error(f"no call has raised this: {unraised}")


def _leave_all() -> None:
    try:
        _leave_alive()
    except KeyboardInterrupt as interrupt:  # of the wait for issued calls: the groups end now
        process_end.note_exception(interrupt)
        _leave_alive()
        raise


def _leave_alive() -> None:
    reason, flush = None, FLUSH_SECONDS
    if (error := process_end.ending_exception()) is not None:
        fail_all(error)
        reason, flush = exit_reason.reason_of(error), 0.0
    elif (error := process_end.thread_exception()) is not None:
        reason, flush = exit_reason.reason_of(error), _FAILED_SECONDS
    for group in list(_alive):
        if (unraised := _leave(group, reason, flush)) is not None:
            _report(unraised)


def _record(error: BaseException) -> None:
    """Leave a record of the exception that ends this process to its launcher."""
    if TORCHELASTIC_ERROR_FILE.is_set() and isinstance(error, Exception):
        with _recording():
            from procgroup.process import error_file  # needed after a failure only

            error_file.leave(error)


@contextmanager
def _recording() -> Iterator[None]:
    """Write a record with the spare descriptor; a record that cannot be written hides no exception."""
    _free_spare()
    with suppress(ImportError, MemoryError, OSError):
        yield


def _free_spare() -> None:
    while _spare:
        number = _spare.pop()
        with suppress(OSError):
            if os.path.samestat(os.fstat(number), Path(os.devnull).stat()):  # and not a file of the program
                os.close(number)


def _end_after_the_cause() -> None:
    """Write the record of this process's failure, then wait until the launcher has seen the rank that caused it.

    This runs, too, if the program handled the loss of a rank and exits with a status of its own, which is unknown here.
    """
    error, lost = process_end.ending_exception(), state.lost
    origin = exit_reason.Origin(exit_reason.PEER, lost.rank) if lost is not None else exit_reason.Origin()
    if error is not None:
        _record(error)
        origin = exit_reason.origin_of(error)
    elif lost is not None and TORCHELASTIC_ERROR_FILE.is_set():
        with _recording():
            from procgroup.process import error_file

            error_file.leave_text(lost.text, origin)
    if lost is not None and origin.kind == exit_reason.PEER and origin.peer in (None, lost.rank):
        from procgroup.api import order_of_ends

        order_of_ends.let_end_first(lost)


def _mark_forked() -> None:
    for group in _alive:
        group.mark_forked()
    _kept.extend(_alive.items())
    _alive.clear()
    _children.clear()
    _worlds.clear()
    _handled_before.clear()
    _free_spare()
    remove_excepthook()


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
ThreadHook = Callable[[threading.ExceptHookArgs], Any]


class UncaughtHook:
    """An excepthook that calls the former hook, and then ends the groups if the exception ends the process.

    With a ``rank`` each printed line stands behind "[rank3]: ".
    """

    def __init__(self, rank: int | None, former: Hook) -> None:
        self.rank = rank
        self.former = former
        self.is_active = True

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            self._print(kind, error, traceback)
        finally:
            if self.is_active and _ends_the_process():
                fail_all(error)
                _record(error)

    def _print(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # No prefix if torch.distributed's own hook called this one, because that hook prefixes every line.
        if self.rank is None or (getattr(sys.excepthook, "__module__", None) or "").startswith("torch.distributed"):
            self.former(kind, error, traceback)
            return
        with redirect_stderr(io.StringIO()) as text:
            self.former(kind, error, traceback)
        lines = text.getvalue().splitlines(keepends=True)
        sys.stderr.write("".join(f"[rank{self.rank}]: {line}" if line.strip() else line for line in lines))


class UncaughtInThread:
    """A threading.excepthook that records the exception that ended a thread, which may have run the main program."""

    def __init__(self, former: ThreadHook) -> None:
        self.former = former

    def __call__(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            process_end.note_thread_exception(arguments.exc_value)
        self.former(arguments)


_installed: list[UncaughtHook] = []


def install_excepthook(rank: int | None) -> None:
    """Fail all groups with the exception that ends this process, from now on; with a rank, prefix what is printed."""
    remove_excepthook()
    hook = UncaughtHook(rank, sys.excepthook)
    _installed.append(hook)
    sys.excepthook = hook
    if not isinstance(threading.excepthook, UncaughtInThread):
        threading.excepthook = UncaughtInThread(threading.excepthook)


def remove_excepthook() -> None:
    """Restore the earlier hooks; hooks that other code has installed since then stay, and run without ours."""
    for hook in _installed:
        hook.rank, hook.is_active = None, False
    _installed.clear()
    while isinstance(sys.excepthook, UncaughtHook):
        sys.excepthook = sys.excepthook.former
    if isinstance(threading.excepthook, UncaughtInThread):
        threading.excepthook = threading.excepthook.former


def _ends_the_process() -> bool:
    """Return whether the interpreter itself has called sys.excepthook for the main program, which has ended then.

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
