"""The default group: the one mutable global of the package.

It is kept in a slot. A thread or task that plays a rank of its own calls ``use_own_slot`` first; whoever
did not shares the process's slot.
"""

from __future__ import annotations

from contextvars import ContextVar

from procgroup.groups.group import ProcessGroup


class Slot:
    """Where one rank keeps its default group. ``was_used`` tells whether it ever had one."""

    __slots__ = ("group", "was_used")

    def __init__(self) -> None:
        self.group: ProcessGroup | None = None
        self.was_used: bool = False


PROCESS_SLOT = Slot()
SLOT: ContextVar[Slot] = ContextVar("procgroup_default", default=PROCESS_SLOT)


def slot() -> Slot:
    """Return the slot of the calling thread or task."""
    return SLOT.get()


def use_own_slot() -> None:
    """Give the calling thread or task a default group of its own, so that it can be a rank by itself."""
    SLOT.set(Slot())


def current() -> ProcessGroup:
    """Return the default group. Raises ValueError before init_process_group and after destroy_process_group."""
    group = SLOT.get().group
    if group is None:
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    return group
