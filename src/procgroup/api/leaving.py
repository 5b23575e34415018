"""What becomes of groups when the process ends or forks.

At exit a group that was never destroyed leaves in order. A forked child shares no connection with the
other ranks: its copies of the groups raise ForkedProcessError, and it says goodbye to nobody.
"""

from __future__ import annotations

import os

from procgroup.api import excepthook
from procgroup.groups.group import ProcessGroup
from procgroup.process_end import at_process_end
from procgroup.rendezvous import hosting
from procgroup.stores.store import Store

_alive: dict[ProcessGroup, Store | None] = {}
_is_watching: list[bool] = []

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
    _alive[group] = store


def adopt(group: ProcessGroup, world: ProcessGroup) -> None:
    """Look after a group that was made among the ranks of ``world``, and ends with it."""
    _alive[group] = None
    _children.setdefault(world, {})[group] = None


def leave(group: ProcessGroup) -> None:
    """End a group in order, after those that were made from it, and close its own store. Idempotent."""
    for child in reversed(_children.pop(group, {})):
        leave(child)
    for siblings in _children.values():
        siblings.pop(group, None)
    group.shutdown()
    store = _alive.pop(group, None)
    if store is not None:
        hosting.let_go(store)


def _leave_all() -> None:
    for group in list(_alive):
        leave(group)


def _mark_forked() -> None:
    for group in _alive:
        group.mark_forked()
    _kept.extend(_alive.items())
    _alive.clear()
    _children.clear()
    excepthook.remove()
