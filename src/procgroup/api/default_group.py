"""The default group, and the group that a call without one uses.

The default group is kept in a slot. A thread or task that is a rank of its own calls ``use_own_slot`` first; all
others share the process's slot.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar, cast

from procgroup.groups.group import ProcessGroup

Group = ProcessGroup | None
"""A group that a call is given: None means the default group."""


class Slot:
    """Where one rank keeps its default group. ``was_used`` is True once it has had one.

    ``start`` holds the arguments for making it again.
    """

    __slots__ = ("group", "start", "was_used")

    def __init__(self) -> None:
        self.group: ProcessGroup | None = None
        self.start: Any = None
        self.was_used: bool = False


PROCESS_SLOT = Slot()
SLOT: ContextVar[Slot] = ContextVar("procgroup_default", default=PROCESS_SLOT)

slot: Callable[[], Slot] = SLOT.get
"""Return the slot of the calling thread or task. Bound once: at every call that would take some 60 ns."""


def use_own_slot() -> None:
    """Give the calling thread or task a default group of its own, so that it can be a rank by itself."""
    SLOT.set(Slot())


def current() -> ProcessGroup:
    """Return the default group. Raises ValueError before init_process_group and after destroy_process_group."""
    group = SLOT.get().group
    if group is None:
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    return group


class _World(type):
    """Lets ``group.WORLD`` be the default group of the moment."""

    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802 - torch.distributed's name
        return slot().group


class group(metaclass=_World):  # noqa: N801 - torch.distributed's name
    """``group.WORLD`` is the default group; None before init_process_group."""


class GroupMember(metaclass=_World):
    """``GroupMember.NON_GROUP_MEMBER`` stands for a group that this rank is not in."""

    # A number, as in torch; a group to type checkers, so that programs can compare and pass on what new_group returns.
    NON_GROUP_MEMBER: ClassVar[ProcessGroup] = cast(Any, -100)


def resolve(given: Any) -> ProcessGroup:
    """Return the group that ``group=given`` means. Raises ValueError unless it is a ProcessGroup or None."""
    if given is None:
        return current()
    if isinstance(given, ProcessGroup):
        return given
    raise ValueError(
        f"Invalid process group specified: {given!r}; expected a ProcessGroup of this rank, "
        "or None for the default group"
    )


def choose(given: Any, op: str) -> ProcessGroup | None:
    """Return the group that ``group=given`` means to a call of ``op``.

    None, after a warning, when this rank is not in it: then the call does nothing.
    """
    if given is None:
        return SLOT.get().group or current()
    if is_foreign(given):
        _warn_foreign(op)
        return None
    return resolve(given)


def is_foreign(given: Any) -> bool:
    """Return whether ``group=given`` stands for a group that this rank is not in."""
    non_member: object = GroupMember.NON_GROUP_MEMBER
    return isinstance(given, int) and given == non_member


def _warn_foreign(op: str) -> None:
    world = slot().group
    rank = -1 if world is None else world.rank()
    warnings.warn(
        f"Running {op} on global rank {rank} which does not belong to the given group.", UserWarning, stacklevel=4
    )
