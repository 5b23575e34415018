"""The ranks of groups and hosts, and which member a call means.

``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` group ranks.
"""

from __future__ import annotations

from procgroup.api.default_group import Group, is_foreign, resolve
from procgroup.groups.group import ProcessGroup
from procgroup.process import environ

SOURCE = ("src", "group_src")
DESTINATION = ("dst", "group_dst")
"""Names of the two parameters for one rank."""


def get_rank(group: Group = None) -> int:
    """Return this process's rank in a group; -1 when it is not in it. Raises ValueError before init_process_group."""
    return -1 if is_foreign(group) else resolve(group).rank()


def get_world_size(group: Group = None) -> int:
    """Return how many ranks a group has; -1 when this process is not in it.

    Raises ValueError before init_process_group.
    """
    return -1 if is_foreign(group) else resolve(group).size()


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, in group order."""
    return list(resolve(group).members)


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Return a global rank's rank in a group. Raises ValueError when it is not a member."""
    if is_foreign(group):
        raise ValueError(
            f"Global rank {global_rank} is not part of group {group} (NON_GROUP_MEMBER), which this rank is not in."
        )
    return resolve(group).group_rank(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return a group rank's global rank. Raises ValueError when the group has no such rank."""
    if is_foreign(group):
        raise ValueError(
            f"Group rank {group_rank} is not part of group {group} (NON_GROUP_MEMBER), which this rank is not in."
        )
    return resolve(group).global_rank(group_rank)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank on its host: LOCAL_RANK, else srun's or mpiexec's number, else ``fallback_rank``.

    Raises RuntimeError if none of the three is available.
    """
    local_rank = environ.LOCAL_RANK.get()
    if local_rank is not None:
        return local_rank
    local_rank = _launcher_s_local_rank()
    if local_rank is not None:
        return local_rank
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError(
        "LOCAL_RANK is not in the environment. Consider passing fallback_rank to allow `get_node_local_rank` to work, "
        "assuming you are not running in a multi-device context and want the code to run locally instead."
    )


def group_rank_of(
    group: ProcessGroup, global_rank: int | None, group_rank: int | None, names: tuple[str, str] = SOURCE
) -> int:
    """Resolve a global or a group rank to a group rank; ``names`` are those of the two parameters, for errors.

    Raises ValueError unless exactly one of the two is given.
    """
    if group_rank is None and global_rank.__class__ is int:
        rank = group.group_ranks.get(global_rank)
        if rank is not None:
            return rank
    if global_rank is None:
        if group_rank is None:
            raise ValueError(
                f"Must specify global_rank or group_rank: pass {names[0]}=, a global rank, or {names[1]}=, a rank of "
                "the group."
            )
        return group_rank
    if group_rank is not None:
        raise ValueError(
            f"Can't specify both group_rank and global_rank: pass {names[0]}=, a global rank, or {names[1]}=, a rank "
            "of the group."
        )
    try:
        return group.group_rank(global_rank)
    except ValueError as error:
        if not 0 <= global_rank < group.size():
            raise
        raise ValueError(
            f"{error} `{names[0]}` is a global rank: for the group's own rank {global_rank}, which is global rank "
            f"{group.members[global_rank]}, pass {names[1]}={global_rank}."
        ) from None


def root_or_first(
    group: ProcessGroup, global_rank: int | None, group_rank: int | None, names: tuple[str, str] = SOURCE
) -> int:
    """Resolve to a group rank; the default is global rank 0. Raises ValueError when both ranks are given."""
    if group_rank is None and global_rank.__class__ is int:
        rank = group.group_ranks.get(global_rank)
        if rank is not None:
            return rank
    if global_rank is None and group_rank is None:
        global_rank = 0
    return group_rank_of(group, global_rank, group_rank, names)


def _launcher_s_local_rank() -> int | None:
    """Return the number that srun or mpiexec gave this rank on its host; None for a rank that they did not number."""
    from procgroup.cluster import task_launcher  # not for every start of a program

    task = task_launcher.detect()
    is_rank = task is not None and environ.RANK.get() in (None, task.rank) and not environ.TORCHELASTIC_RUN_ID.is_set()
    return task.local_rank if task is not None and is_rank else None
