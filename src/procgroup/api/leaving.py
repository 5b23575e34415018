"""What becomes of groups when the process ends or forks.

At exit a group that was never destroyed leaves in order: what was issued is given some time to end. An exception that
ends the program ends the group at once, and the other ranks are given its type, text and line. A group that is
destroyed while an exception is handled, as in a ``finally`` clause, is between the two: what was issued is given a
second, and then ranks that wait for this one are given the exception. A forked child shares no connection with the
other ranks: its copies of the groups raise ForkedProcessError, and it says goodbye to nobody.
"""

from __future__ import annotations

import os
import sys

from procgroup import exit_reason, process_end
from procgroup.api import excepthook
from procgroup.errors import DistError
from procgroup.groups.engine import FLUSH_SECONDS
from procgroup.groups.group import ProcessGroup
from procgroup.process_end import at_process_end
from procgroup.rendezvous import hosting
from procgroup.stores.store import Store

# How long what was issued is given to end when the group is destroyed while an exception is handled.
_FAILED_SECONDS = 1.0
# Exceptions that steer programs, and say of none that it failed.
_STEERING = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit)

_alive: dict[ProcessGroup, Store | None] = {}
_is_watching: list[bool] = []
# The exception that was being handled when a group was made, by its id(): it says nothing of the group.
_handled_before: dict[ProcessGroup, int] = {}

# The groups that were made among the ranks of a default group, which end with it: oldest first.
_children: dict[ProcessGroup, dict[ProcessGroup, None]] = {}

# A forked child must not run the destructors of what its parent uses.
_kept: list[tuple[ProcessGroup, Store | None]] = []


def watch(group: ProcessGroup, store: Store | None) -> None:
    """Look after a group, and the store if it is the group's own, from now on."""
    if not _is_watching:
        _is_watching.append(True)
        os.register_at_fork(after_in_child=_mark_forked)
    at_process_end(_leave_all, priority=1)  # before the stores that this process hosts wait for their clients
    if not excepthook.is_installed():
        excepthook.install(None, fail_all)
    _alive[group] = store
    _handled_before[group] = id(sys.exc_info()[1])


def adopt(group: ProcessGroup, world: ProcessGroup) -> None:
    """Look after a group that was made among the ranks of ``world``, and ends with it."""
    _alive[group] = None
    _handled_before[group] = _handled_before.get(world, 0)
    _children.setdefault(world, {})[group] = None


def leave(group: ProcessGroup) -> None:
    """End a group, after those that were made from it, and close its own store. Idempotent."""
    reason = _reason_to_leave(group)
    _leave(group, reason, _FAILED_SECONDS if reason else FLUSH_SECONDS)


def fail(group: ProcessGroup, error: BaseException) -> None:
    """Tell the other ranks that this exception ends this rank.

    Their calls fail at once; only those that wait for this rank where the exception is a consequence of what they know.
    """
    group.fail(exit_reason.describe(error), at_once=not isinstance(error, DistError))


def fail_all(error: BaseException) -> None:
    """Tell the other ranks of all groups that this exception ends this process."""
    for group in _alive:
        fail(group, error)


def _reason_to_leave(group: ProcessGroup) -> str:
    """Return what there is to say of the exception that is being handled now; "" without one."""
    error = sys.exc_info()[1]
    if error is None or isinstance(error, _STEERING) or id(error) == _handled_before.get(group):
        return ""
    return exit_reason.describe(error)


def _leave(group: ProcessGroup, reason: str, flush: float) -> None:
    for child in reversed(_children.pop(group, {})):
        _leave(child, reason, flush)
    for siblings in _children.values():
        siblings.pop(group, None)
    _handled_before.pop(group, None)
    group.shutdown(reason, flush)
    store = _alive.pop(group, None)
    if store is not None:
        hosting.let_go(store)


def _leave_all() -> None:
    reason, flush = "", FLUSH_SECONDS
    if (error := process_end.ending_exception()) is not None:
        fail_all(error)
        reason, flush = exit_reason.describe(error), 0.0
    elif (error := process_end.thread_exception()) is not None:
        reason, flush = exit_reason.describe(error), _FAILED_SECONDS
    for group in list(_alive):
        _leave(group, reason, flush)


def _mark_forked() -> None:
    for group in _alive:
        group.mark_forked()
    _kept.extend(_alive.items())
    _alive.clear()
    _children.clear()
    _handled_before.clear()
    excepthook.remove()
