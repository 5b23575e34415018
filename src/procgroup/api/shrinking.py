"""Going on without lost ranks: the others make a smaller group and use that from then on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from procgroup.api import default_group, exit_hooks, moved_store
from procgroup.api.default_group import resolve
from procgroup.api.options import read_timeouts
from procgroup.groups import checks
from procgroup.groups.engine import GroupEngine
from procgroup.groups.group import ProcessGroup
from procgroup.process import log, process_end
from procgroup.rendezvous import hosting
from procgroup.stores.store import Store
from procgroup.types import Timeout


def shrink_group(
    ranks_to_exclude: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    shrink_flags: int = 0,
    pg_options: Any = None,
    timeout: Timeout | None = None,
) -> ProcessGroup:
    """Make a group of the surviving members of ``group``, without ``ranks_to_exclude``, and return it.

    Every remaining rank calls it, also after a call failed because a rank was lost. It returns when all have called it.
    The ranks detect the lost ranks themselves. Calls in progress on ``group`` end on all members, with PeerLost or
    PeerFailed, and later ones raise GroupDestroyed. Where ``group`` is the default group (None), the new group takes
    its place: its ranks are numbered from 0 without gaps, in their old order, which changes get_rank() and
    get_world_size(), and groups that were made from the old one end. ``ranks_to_exclude`` are global ranks of living
    processes, which must not call it. ``shrink_flags`` is taken for compatibility; calls in progress are always ended.
    Where the store was in a process that is not in the new group, the new group has a store on its rank 0. ``timeout``,
    by default the group's, limits the wait for the other ranks.

    Raises ValueError if this rank is excluded or a rank is not in the group, CollectiveTimeout, which names living
    ranks that did not call it. The name and the parameters are torch.distributed's, where only NCCL has it.
    """
    chosen = resolve(group)
    slot = default_group.slot()
    excluded = _checked(ranks_to_exclude or (), chosen)
    limit = read_timeouts(timeout, pg_options, chosen.timeout).calls
    is_default = chosen is slot.group
    moved: list[Store] = []

    def move_store(engine: GroupEngine, rank: int, store: Store, timeout: timedelta) -> Store:
        moved.append(moved_store.open_store(engine, rank, store, timeout))
        return moved[-1]

    base, dot, number = chosen.group_name.rpartition(".")  # "0.1" follows "0", and "0.2" follows that
    name = f"{base}.{int(number) + 1}" if dot and number.isdigit() else f"{chosen.group_name}.1"
    made = chosen.shrink(excluded, group_name=name, timeout=limit, renumber=is_default, move_store=move_store)
    store = exit_hooks.let_go(chosen)
    if moved and store is not None:
        hosting.close_unless_hosted(store)
        store = moved[-1]
    if is_default:
        exit_hooks.watch(made, store)
        slot.group = made
    else:
        exit_hooks.adopt(made, default_group.current())
    process_end.forget_failure()
    log.info(f"group {chosen.group_name} of {chosen.size()} ranks goes on as group {made.group_name} of {made.size()}")
    return made


def _checked(ranks: Sequence[int], group: ProcessGroup) -> set[int]:
    """Return group ranks. Raises ValueError for ranks that are not in the group, and for this one."""
    excluded = {group.group_rank(checks.as_index(rank, "rank")) for rank in ranks}
    if group.rank() in excluded:
        raise ValueError(
            f"rank {group.members[group.rank()]} is in ranks_to_exclude={list(ranks)}; "
            "an excluded rank must not call shrink_group"
        )
    return excluded
