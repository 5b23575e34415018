"""The ranks of a DistributedSampler, and the comparison of what they visit.

The comparison never waits, because a rank may read its data alone. The first rank that starts a pass stores a
description of it in the group's store; a rank with another description reads the first one and raises.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from procgroup.api import default_group
from procgroup.errors import DistStoreError
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.group_choice import group_of
from procgroup.parallel.rank_comparison import mismatch
from procgroup.stores.prefix import PrefixStore


class Comparison:
    """Compares the samplers of a group's ranks in the order of their creation: the first of each rank, and so on."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._number = 0
        with suppress(DistStoreError):  # the store's host has ended: data can be read without a comparison
            self._number = group.get_group_store().add(f"samplers/of_rank/{group.rank()}", 1)

    def compare(self, key: str, description: str) -> None:
        """Raise CollectiveMismatch when another rank has stored a different description under this key."""
        if self._number == 0 or not self._group.is_usable():
            return
        group, first = self._group, ""
        with suppress(DistStoreError):
            store = PrefixStore(f"samplers/{self._number}", group.get_group_store())
            first = store.compare_set(key, "", f"{group.rank()} {description}").decode()
        other_rank, _, other = first.partition(" ")
        if first and other != description:
            held = {int(other_rank): other, group.rank(): description}
            advice = (
                "Give every rank the same data, seed and epoch, and make the samplers in the same order on every rank."
            )
            raise mismatch(group, "DistributedSampler", held, differing="data", advice=advice, sequence=self._number)


def world_of(num_replicas: int | None, rank: int | None, group: Any) -> tuple[int, int, Comparison | None]:
    """Return the number of ranks, this rank, and the comparison of the ranks if both numbers are those of a group.

    Numbers that are None are those of ``group``, by default of the default group or else of torch.distributed's. Raises
    ValueError without any group, for a rank out of range, and for a group together with one of the numbers.
    """
    if group is not None and not (num_replicas is None and rank is None):
        raise ValueError("Pass `group`, or `num_replicas` and `rank`, not both.")
    comparison = None
    if num_replicas is None or rank is None:
        chosen = default_group.slot().group if group is None else group_of(group)
        if chosen is None:
            size, own = _world_of_torch()
        else:
            size, own = chosen.size(), chosen.rank()
            if num_replicas is None and rank is None:
                comparison = Comparison(chosen)
        num_replicas = size if num_replicas is None else num_replicas
        rank = own if rank is None else rank
    if rank >= num_replicas or rank < 0:
        raise ValueError(f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]")
    return num_replicas, rank, comparison


def _world_of_torch() -> tuple[int, int]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group, "
            "or pass `num_replicas` and `rank` to DistributedSampler."
        )
    return torch.distributed.get_world_size(), torch.distributed.get_rank()
