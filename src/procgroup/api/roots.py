"""Which member a call means: ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` group ranks."""

from __future__ import annotations

from procgroup.groups.group import ProcessGroup


def group_rank_of(group: ProcessGroup, global_rank: int | None, group_rank: int | None) -> int:
    """Return the group rank of whoever is meant. Raises ValueError unless exactly one of the two is given."""
    if group_rank is None and global_rank.__class__ is int:
        rank = group.group_ranks.get(global_rank)
        if rank is not None:
            return rank
    if global_rank is None:
        if group_rank is None:
            raise ValueError("Must specify global_rank or group_rank")
        return group_rank
    if group_rank is not None:
        raise ValueError("Can't specify both group_rank and global_rank")
    return group.group_rank(global_rank)


def root_or_first(group: ProcessGroup, global_rank: int | None, group_rank: int | None) -> int:
    """Return the group rank of whoever is meant, global rank 0 when nobody is named. Raises ValueError for both."""
    if global_rank is None and group_rank is None:
        global_rank = 0
    return group_rank_of(group, global_rank, group_rank)
