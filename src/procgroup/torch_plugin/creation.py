"""Makes a group of the plug-in from the data that torch has of a new group.

The ranks of the default group find a store of procgroup's in torch's store, and meet there as those of procgroup's own
default group do: they exchange their addresses, share a random key that authenticates their connections, and connect. A
group of some ranks of a default group of procgroup shares that group's connections, and uses no store.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from procgroup.api import exit_hooks, lifecycle
from procgroup.backends import registry
from procgroup.groups.group import ProcessGroup
from procgroup.rendezvous import hosting
from procgroup.torch_plugin.calls import TorchCalls
from procgroup.torch_plugin.process_group import TorchProcessGroup
from procgroup.torch_plugin.store import TorchStore

# The store that rank 0 hosts would end with the group. A rank that is quicker to initialise again connects to it before
# that: so it stays, and torch uses its server again, until the next group is there.
_last_store: list[Any] = []


def create(options: Any, *, name: str, kind: type[TorchProcessGroup] = TorchProcessGroup) -> Any:
    """Make the group that torch describes, of this kind; return when all its ranks have.

    Raises RendezvousTimeout or CollectiveTimeout, which name the ranks that did not come.
    """
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    group = make(options.store, options.group_rank, members, options.group_id, options.timeout)
    created = kind(group.rank(), group.size())
    created.stand_for(group, options.store, name=name, members=members)
    return created


def make(store: Any, rank: int, members: Sequence[int], group_name: str, timeout: timedelta) -> ProcessGroup:
    """Make procgroup's group of these global ranks, of which this one has the group rank ``rank``."""
    world = _default_group()
    if world is not None:
        made = world.make_subgroup(
            members, op="new_group", group_name=group_name, timeout=timeout, group_desc="undefined"
        )
        exit_hooks.adopt(made, world)
        return made
    registry.check_engine(len(members))
    from procgroup.torch_plugin import meeting  # which needs the engine

    started = time.monotonic()
    met = meeting.open_store(store, rank, len(members), timeout)
    try:
        group = lifecycle.make_group(
            TorchStore(store), rank, members, group_name=group_name, timeout=timeout, meeting=met, started=started
        )
    finally:
        hosting.let_go(met)
    if rank == 0:
        _last_store[:] = [store]
    return group


def _default_group() -> ProcessGroup | None:
    """Return the group under torch's default group, if that is one of the plug-in's."""
    if not distributed_c10d.is_initialized():
        return None
    default = distributed_c10d._get_default_group()
    if not isinstance(default, TorchCalls):
        default = _cpu_backend(default)
    return default.group if isinstance(default, TorchCalls) else None


def _cpu_backend(group: Any) -> Any:
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none for CPU tensors
        return None
