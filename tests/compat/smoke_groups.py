"""Smoke programs of what ranks do about groups, on two ranks."""

from __future__ import annotations

import numpy as np
import pytest
from compat.registry import shows

import procgroup as dist


def total(group: object) -> float:
    array = np.full(1, dist.get_rank() + 1.0)
    dist.all_reduce(array, group=group)  # type: ignore[arg-type]
    return float(array[0])


@shows("new_group")
def new_group() -> None:
    both, one = dist.new_group(), dist.new_group([1])
    assert total(both) == 3.0
    assert dist.get_rank(one) == (-1 if dist.get_rank() == 0 else 0)


@shows("new_subgroups")
def new_subgroups() -> None:
    mine, every = dist.new_subgroups(1)
    assert len(every) == 2
    assert total(mine) == dist.get_rank() + 1


@shows("new_subgroups_by_enumeration")
def new_subgroups_by_enumeration() -> None:
    mine, every = dist.new_subgroups_by_enumeration([[1, 0]])
    assert len(every) == 1
    assert total(mine) == 3.0


@shows("split_group")
def split_group() -> None:
    mine = dist.split_group(split_ranks=[[0], [1]])
    assert dist.get_world_size(mine) == 1
    assert total(mine) == dist.get_rank() + 1


@shows("shrink_group")
def shrink_group() -> None:
    smaller = dist.shrink_group()
    assert smaller is dist.group.WORLD and dist.get_world_size() == 2
    assert total(None) == 3.0


@shows("get_pg_count")
def count_of_groups() -> None:
    before = dist.get_pg_count()
    dist.new_group()
    assert dist.get_pg_count() == before + 1


@shows("monitored_barrier")
def monitored_barrier() -> None:
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    dist.monitored_barrier()
    if dist.get_rank() == 1:
        store.get("rank 0 knows")
        return
    try:
        with pytest.raises(dist.CollectiveTimeout, match="still waiting for rank 1"):
            dist.monitored_barrier(timeout=0.05)
    finally:
        store.set("rank 0 knows", "")
