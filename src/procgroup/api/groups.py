"""Groups of some of the ranks.

Only the members of a group need to call these functions, with the same ranks and in the same order; other ranks may
call them and get ``GroupMember.NON_GROUP_MEMBER``. A member that does not call is named at the timeout. A member that
makes another group instead is named within a few seconds. ``timeout`` limits this wait, and every call of the new
group.

Differences from torch.distributed: ``timeout`` is by default the parent group's; a rank that is not a member
gets NON_GROUP_MEMBER with ``use_local_synchronization`` too, because None would mean the default group to later calls.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

from procgroup.api import default_group, exit_hooks
from procgroup.api.default_group import GroupMember, is_foreign
from procgroup.api.options import read_backend, read_deterministic, read_timeouts
from procgroup.api.ranks import get_process_group_ranks, get_world_size
from procgroup.backends import registry
from procgroup.cluster.accelerators import visible_gpus
from procgroup.errors.texts import name_ranks
from procgroup.groups import checks
from procgroup.groups.backend import MakeBackends
from procgroup.groups.group import ProcessGroup
from procgroup.process import log
from procgroup.types import Timeout

_SHOWN_RANKS = 16

# How many groups have been numbered under each default group, which itself is number 0.
_numbers: WeakKeyDictionary[ProcessGroup, itertools.count[int]] = WeakKeyDictionary()
_hashed_numbers: WeakKeyDictionary[ProcessGroup, itertools.count[int]] = WeakKeyDictionary()


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
    deterministic: str | None = None,
) -> ProcessGroup:
    """Make a group of these global ranks (None: all), sorted unless ``sort_ranks`` is False.

    Returns when every member has called it; GroupMember.NON_GROUP_MEMBER on other ranks. ``use_local_synchronization``
    names the group after its ranks instead of a number. ``device_id`` is that of init_process_group, and so is
    ``deterministic="order"``, which every group inherits. Raises ValueError for duplicate or unknown ranks,
    CollectiveTimeout, which names missing members, CollectiveMismatch if members make different groups.
    """
    world = default_group.current()
    timeouts = read_timeouts(timeout, pg_options, world.timeout)
    chosen = _read_backend(backend, device_id, pg_options)
    in_rank_order = read_deterministic(deterministic, pg_options)
    members = list(range(world.size())) if ranks is None else _checked_ranks(ranks, world.size(), sort_ranks)
    number = _take_number(world, hashed=use_local_synchronization)
    if world.rank() not in members:
        return GroupMember.NON_GROUP_MEMBER
    made = _make(
        world,
        members,
        op="new_group",
        group_name=_hashed_name(members, number) if use_local_synchronization else str(number),
        timeout=timeouts.calls,
        start_timeout=timeouts.start,
        group_desc="undefined" if group_desc is None else group_desc,
        backend=chosen,
    )
    if in_rank_order:
        made.reduce_in_rank_order()
    return made


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Cut a group into groups of ``group_size`` consecutive ranks; return (the one of this rank, all of them).

    ``group_size`` is by default the number of accelerators of this host. Raises ValueError without any, and unless
    it divides the group's size.
    """
    if group_size is None:
        group_size = visible_gpus()
        if group_size == 0:
            raise ValueError(
                "Default group size only takes effect when there are accelerators; please pass in 'group_size'."
            )
    if group_size <= 0:
        raise ValueError(f"The arg 'group_size' ({group_size}) must be positive")
    if is_foreign(group):
        raise ValueError("new_subgroups: this rank is not in `group`; call it on the group's members only")
    world_size = get_world_size(group)
    if world_size < group_size:
        raise ValueError(f"The arg 'group_size' ({group_size}) must not exceed the size of the group ({world_size})")
    if world_size % group_size != 0:
        raise ValueError(f"The world size ({world_size}) must be divisible by 'group_size={group_size}'")
    ranks = get_process_group_ranks(group)
    lists = [ranks[start : start + group_size] for start in range(0, len(ranks), group_size)]
    mine, made = new_subgroups_by_enumeration(lists, timeout, backend, pg_options, group_desc)
    assert mine is not None, "every rank of the group is in one of the lists"
    return mine, made


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup]]:
    """Make a group of each list of global ranks; return (the one of this rank or None, all of them).

    Groups that this rank is not in are NON_GROUP_MEMBER. Raises ValueError for no lists and for lists that overlap.
    """
    if not ranks_per_subgroup_list:
        raise ValueError("The arg 'ranks_per_subgroup_list' cannot be empty")
    placed: dict[int, Sequence[int]] = {}
    for ranks in ranks_per_subgroup_list:
        for rank in ranks:
            if rank in placed:
                raise ValueError(f"Rank {rank} has appeared in both subgroup {placed[rank]} and {ranks}")
            placed[rank] = ranks
    made = [new_group(ranks, timeout, backend, pg_options, group_desc=group_desc) for ranks in ranks_per_subgroup_list]
    return next((subgroup for subgroup in made if not is_foreign(subgroup)), None), made


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Make a group of each list of the parent's group ranks; return the one of this rank, or None.

    Raises ValueError for lists that are empty, overlap or contain unknown ranks, for a parent that this rank
    is not in, and for a ``backend`` other than the parent's.
    """
    world = default_group.current()
    parent = world if parent_pg is None else parent_pg
    if not isinstance(parent, ProcessGroup):
        raise ValueError(f"Group {parent} is not registered: expected a ProcessGroup that this rank is in, or None")
    splits = _checked_splits(split_ranks, parent.size())
    if backend is not None and registry.parse(backend).name != parent.name():
        raise ValueError(f"Backend mismatch: parent has '{parent.name()}', requested '{backend}'.")
    timeouts = read_timeouts(timeout, pg_options, parent.timeout)
    number = _take_number(world, hashed=True)
    mine = next((ranks for ranks in splits if parent.rank() in ranks), None)
    if mine is None:
        return None
    return _make(
        parent,
        mine,
        op="split_group",
        group_name=_hashed_name([parent.members[rank] for rank in mine], number),
        timeout=timeouts.calls,
        start_timeout=timeouts.start,
        group_desc=f"{parent.group_desc}:split:{number}" if group_desc is None else group_desc,
    )


def get_pg_count() -> int:
    """Return how many groups have a number as name: the default group, and those of new_group. 0 before the start.

    Groups named by a hash are not counted.
    """
    world = default_group.slot().group
    if world is None:
        return 0
    numbers = _numbers.get(world, itertools.count(1))
    return next(copy(numbers))


def _make(parent: ProcessGroup, ranks: Sequence[int], **how: Any) -> ProcessGroup:
    made = parent.make_subgroup(ranks, **how)
    exit_hooks.adopt(made, default_group.current())
    if log.is_enabled(log.INFO):
        what = f"group {made.group_name} of {_short(made.members)}"
        log.info(f"{what}: backend {made.backend_config}, {made.transport}", made.members[made.rank()])
    return made


def _short(ranks: Sequence[int]) -> str:
    more = len(ranks) - _SHOWN_RANKS
    return name_ranks(ranks[:_SHOWN_RANKS]) + (f" and {more} more" if more > 0 else "")


def _checked_ranks(ranks: Sequence[int], world_size: int, sort: bool) -> list[int]:
    checked = [checks.as_index(rank, "rank") for rank in ranks]
    if sort:
        checked.sort()
    if not checked:
        raise ValueError("ranks list must name at least one rank, got []")
    if len(set(checked)) != len(checked):
        raise ValueError(f"ranks list must not contain duplicate entries, got {checked}")
    if len(checked) > world_size:
        raise ValueError(
            f"the new group's world size should be at most {world_size}, got {len(checked)} ranks: {checked}"
        )
    for rank in checked:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"Rank {rank} is out of range. Valid ranks are 0 to {world_size - 1} (world_size={world_size})"
            )
    return checked


def _checked_splits(split_ranks: Sequence[Sequence[int]] | None, size: int) -> list[list[int]]:
    """Return the lists, each sorted. Raises ValueError unless they are disjoint lists of ranks below ``size``."""
    if split_ranks is None or len(split_ranks) == 0:
        raise ValueError(
            f"split_ranks cannot be None or empty, got {split_ranks!r}: pass lists of the parent's group ranks"
        )
    splits = [sorted(checks.as_index(rank, "rank") for rank in ranks) for ranks in split_ranks]
    seen: dict[int, list[int]] = {}
    for ranks in splits:
        if not ranks:
            raise ValueError(f"the split group cannot be empty, got {split_ranks}")
        if len(ranks) > size:
            raise ValueError(
                f"a split must have at most {size} ranks, the size of the parent group; got {len(ranks)}: {ranks}"
            )
        if len(ranks) != len(set(ranks)):
            raise ValueError(f"the split group cannot have duplicate ranks, got {ranks}")
        for rank in ranks:
            if not 0 <= rank < size:
                raise ValueError(f"Rank {rank} is out of range. The parent group has ranks 0 to {size - 1}")
            if rank in seen:
                raise ValueError(f"Rank {rank} has appeared in both split {seen[rank]} and {ranks}")
            seen[rank] = ranks
    return splits


def _read_backend(backend: str | None, device_id: Any, pg_options: Any) -> tuple[str, str, MakeBackends] | None:
    if not backend:
        return None
    config = read_backend(backend, device_id, pg_options)
    config.load()
    return config.name, str(config), config.make_backends


def _take_number(world: ProcessGroup, *, hashed: bool) -> int:
    """Return the next group's number. Names that are hashes have a row of numbers of their own, as in torch."""
    numbers = _hashed_numbers if hashed else _numbers
    return next(numbers.setdefault(world, itertools.count(1)))


def _hashed_name(members: Sequence[int], number: int) -> str:
    text = "_".join(map(str, [*members, number]))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
