"""Makes a group of the plug-in from the data that torch has of a new group.

The ranks of the default group find a store of procgroup's in torch's store, and meet there as those of procgroup's own
default group do: they exchange their addresses, share a random key that authenticates their connections, and connect. A
group of some ranks of a default group of procgroup shares that group's connections, and uses no store.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from procgroup.api import exit_hooks, lifecycle
from procgroup.backends import nccl_library, registry
from procgroup.groups.group import ProcessGroup
from procgroup.rendezvous import hosting
from procgroup.torch_plugin.calls import TorchCalls
from procgroup.torch_plugin.process_group import TorchProcessGroup
from procgroup.torch_plugin.store import TorchStore

# The store that rank 0 hosts would end with the group. A rank that is quicker to initialise again connects to it before
# that: so it stays, and torch uses its server again, until the next group is there.
_last_store: list[Any] = []


def create(
    options: Any,
    backend_options: Any = None,
    *,
    name: str,
    kind: type[TorchProcessGroup] = TorchProcessGroup,
    by_nccl: bool = True,
) -> Any:
    """Make the group that torch describes, of this kind; return when all its ranks have.

    ``by_nccl`` lets NCCL move tensors on GPUs, where it is found; otherwise they go through host memory.
    ``backend_options`` are those of NCCL: a dict of its options, or torch's ProcessGroupNCCL.Options. Raises
    RendezvousTimeout or CollectiveTimeout, which name the ranks that did not come, and for options what
    nccl_library.read_options raises.
    """
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    config = configuration(backend_options) if by_nccl else WITHOUT_NCCL
    group = make(options.store, options.group_rank, members, options.group_id, options.timeout, config)
    created = kind(group.rank(), group.size())
    created.bind(group, options.store, name=name, members=members)
    return created


def make(
    store: Any, rank: int, members: Sequence[int], group_name: str, timeout: timedelta, config: registry.BackendConfig
) -> ProcessGroup:
    """Make procgroup's group of these global ranks, of which this one has the group rank ``rank``."""
    world = _default_group()
    if world is not None:
        made = world.make_subgroup(
            members,
            op="new_group",
            group_name=group_name,
            timeout=timeout,
            group_desc="undefined",
            backend=(world.name(), str(config), config.make_backends),
        )
        exit_hooks.adopt(made, world)
        return made
    registry.check_engine(len(members))
    from procgroup.torch_plugin import meeting  # which needs the engine

    started = time.monotonic()
    met = meeting.open_store(store, rank, len(members), timeout)
    try:
        group = lifecycle.make_group(
            TorchStore(store),
            rank,
            members,
            group_name=group_name,
            timeout=timeout,
            meeting=met,
            started=started,
            config=config,
        )
    finally:
        hosting.close_unless_hosted(met)
    if rank == 0:
        _last_store[:] = [store]
    return group


WITHOUT_NCCL = registry.parse("procgroup")
"""Tensors on GPUs go through host memory."""


def configuration(backend_options: Any) -> registry.BackendConfig:
    """Return what moves the tensors: NCCL those on GPUs, where it is found. For the options see ``create``."""
    if not nccl_library.is_installed():
        return WITHOUT_NCCL
    config = registry.parse("cpu:procgroup,cuda:nccl")._replace(name="procgroup")
    return config._replace(nccl_options=_nccl_options(backend_options))


def _nccl_options(given: Any) -> Mapping[str, Any] | None:
    """Return the options of NCCL. Of torch's object those of the fields that NCCL's documentation names are taken."""
    if given is None or isinstance(given, Mapping):
        return nccl_library.read_options(given) if given else None
    configuration = getattr(given, "config", None)
    fields = {name: getattr(configuration, name, None) for name in nccl_library.OPTIONS if name != "blocking"}
    # torch leaves what was not chosen at NCCL's mark for that.
    chosen = {name: value for name, value in fields.items() if value not in (None, nccl_library.UNSET)}
    chosen[nccl_library.HIGH_PRIORITY] = bool(getattr(given, nccl_library.HIGH_PRIORITY, False))
    return nccl_library.read_options(chosen)


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
