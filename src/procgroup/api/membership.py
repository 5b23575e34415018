"""Which group a call means: the default one, one that is given, or one that this rank is not in."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, cast

from procgroup.api import default
from procgroup.groups.group import ProcessGroup


class _World(type):
    """Lets ``group.WORLD`` be the default group of the moment."""

    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802 - torch.distributed's name
        return default.slot().group


class group(metaclass=_World):  # noqa: N801 - torch.distributed's name
    """``group.WORLD`` is the default group; None before init_process_group."""


class GroupMember(metaclass=_World):
    """``GroupMember.NON_GROUP_MEMBER`` stands for a group that this rank is not in."""

    # A number, as in torch; a group to type checkers, so that programs can compare and pass on what new_group returns.
    NON_GROUP_MEMBER: ClassVar[ProcessGroup] = cast(Any, -100)


def resolve(given: Any) -> ProcessGroup:
    """Return the group that ``group=given`` means. Raises ValueError when it is none."""
    if given is None:
        return default.current()
    if isinstance(given, ProcessGroup):
        return given
    raise ValueError(f"Invalid process group specified: {given!r}")


def choose(given: Any, op: str) -> ProcessGroup | None:
    """Return the group that ``group=given`` means to a call of ``op``.

    None, after a warning, when this rank is not in it: then the call does nothing.
    """
    if given is None:
        return default.SLOT.get().group or default.current()
    if is_foreign(given):
        _warn_foreign(op)
        return None
    return resolve(given)


def is_foreign(given: Any) -> bool:
    """Tell whether ``group=given`` stands for a group that this rank is not in."""
    non_member: object = GroupMember.NON_GROUP_MEMBER
    return isinstance(given, int) and given == non_member


def _warn_foreign(op: str) -> None:
    world = default.slot().group
    rank = -1 if world is None else world.rank()
    warnings.warn(
        f"Running {op} on global rank {rank} which does not belong to the given group.", UserWarning, stacklevel=4
    )
