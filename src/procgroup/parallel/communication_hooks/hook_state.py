"""The base class of hook states: a process group, settings that must be the same on all ranks, copying and pickling."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

from procgroup.api import default_group
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.group_choice import group_of
from procgroup.parallel.rank_comparison import require_same


class HookState:
    """The state of one hook of one model on this rank."""

    # The attributes that must be the same on all ranks.
    SHARED: ClassVar[tuple[str, ...]] = ()
    # The attributes that hold groups of the caller, or None.
    GROUPS: ClassVar[tuple[str, ...]] = ("process_group",)
    # The attributes that hold groups created by the state, or None: a copy creates its own.
    OWN_GROUPS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self.process_group = process_group
        self._is_compared = False

    def group(self) -> ProcessGroup:
        """Return the group. The first call raises CollectiveMismatch when the ranks' settings differ."""
        group = group_of(self.process_group)
        if not self._is_compared:
            shared = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.SHARED)
            advice = "Pass the same arguments to the hook's state on every rank; nothing was sent."
            value = f"{type(self).__name__}({shared})"
            require_same(group, "communication_hook", value, differing="settings", advice=advice)
            self._is_compared = True
        return group

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without groups; unpickling uses the default group. Raises RuntimeError for another group."""
        groups = dict.fromkeys(self.GROUPS)
        if any(getattr(self, name) not in (None, default_group.slot().group) for name in groups):
            raise RuntimeError(
                f"{type(self).__name__} of another than the default process group cannot be pickled: a group does not "
                "outlive its processes. Save state_dict(model), and load it into a new state."
            )
        return {**self.__dict__, **groups, **dict.fromkeys(self.OWN_GROUPS), "_is_compared": False}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            is_group = name in self.GROUPS or name in self.OWN_GROUPS
            setattr(made, name, value if is_group else copy.deepcopy(value, memo))
        return made
