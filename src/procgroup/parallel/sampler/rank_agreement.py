"""The ranks that a sampler deals its indices out to, and whether they deal from the same order.

Nobody waits for anybody here: a rank may look at its data alone. Of each pass, the first rank leaves in the group's
store what it is about to visit; a rank that comes with something else finds it there and raises.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from procgroup.api import default
from procgroup.errors import CollectiveMismatch, DistStoreError
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.group_choice import group_of
from procgroup.stores.prefix import PrefixStore


class Comparison:
    """Compares the samplers of a group's ranks: the first that each rank makes, the second, and so on."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._number = 0
        with _unless_the_store_is_gone():
            self._number = group.get_group_store().add(f"samplers/of_rank/{group.rank()}", 1)

    def compare(self, moment: str, text: str) -> None:
        """Raise CollectiveMismatch when another rank was here, at this moment, with another text."""
        if self._number == 0 or not self._group.is_usable():
            return
        group, first = self._group, ""
        with _unless_the_store_is_gone():
            store = PrefixStore(f"samplers/{self._number}", group.get_group_store())
            first = store.compare_set(moment, "", f"{group.rank()} {text}").decode()
        other, _, other_text = first.partition(" ")
        if first and other_text != text:
            raise CollectiveMismatch(
                calls={int(other): other_text, group.rank(): text},
                op="DistributedSampler",
                sequence=self._number,
                group=group.group_name,
                rank=group.rank(),
                size=group.size(),
                members=group.members,
            )


def world_of(num_replicas: int | None, rank: int | None, group: Any) -> tuple[int, int, Comparison | None]:
    """Return how many ranks there are, which of them this is and, where a group says so, what compares them.

    What is not given is that of ``group``, by default of the default group or else of torch.distributed's. Raises
    ValueError where there is none, for a rank that the world does not have, and for a group beside these numbers.
    """
    if group is not None and not (num_replicas is None and rank is None):
        raise ValueError("Pass `group`, or `num_replicas` and `rank`, not both.")
    comparison = None
    if num_replicas is None or rank is None:
        chosen = default.slot().group if group is None else group_of(group)
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


@contextmanager
def _unless_the_store_is_gone() -> Iterator[None]:
    """Give up comparing when the store's host has ended: data can be read without it."""
    with suppress(DistStoreError):
        yield
