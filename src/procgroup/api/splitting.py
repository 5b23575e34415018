"""The checks of split_group's lists."""

from __future__ import annotations

from collections.abc import Sequence

from procgroup.groups import checks


def check_splits(split_ranks: Sequence[Sequence[int]] | None, size: int) -> list[list[int]]:
    """Return the lists, each sorted. Raises ValueError unless they are disjoint lists of ranks below ``size``."""
    if split_ranks is None or len(split_ranks) == 0:
        raise ValueError("split_ranks cannot be None or empty")
    splits = [sorted(checks.as_index(rank, "rank") for rank in ranks) for ranks in split_ranks]
    seen: dict[int, list[int]] = {}
    for ranks in splits:
        if not ranks:
            raise ValueError("the split group cannot be empty")
        if len(ranks) > size:
            raise ValueError(
                "the split group's size should be less or equal to the world_size set by init_process_group"
            )
        if len(ranks) != len(set(ranks)):
            raise ValueError("the split group cannot have duplicate ranks")
        for rank in ranks:
            if not 0 <= rank < size:
                raise ValueError(f"Rank {rank} is out of range. The parent group has ranks 0 to {size - 1}")
            if rank in seen:
                raise ValueError(f"Rank {rank} has appeared in both split {seen[rank]} and {ranks}")
            seen[rank] = ranks
    return splits
