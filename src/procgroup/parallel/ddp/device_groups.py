"""Which group moves the tensors of each device of a module.

It is the group of the model, with one exception: a group with NCCL stays on the GPU of its first call. A module on
several GPUs therefore has a further group for each GPU, among the same ranks. These groups end with the model's group,
and all models with the same GPUs share them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from procgroup.api import exit_hooks
from procgroup.backends import registry
from procgroup.backends.nccl import NcclBackend
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.rank_comparison import gather

# By group, and by the numbers of a GPU on all ranks.
_MADE: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = weakref.WeakKeyDictionary()


class DeviceGroups:
    """The groups by device; ``group`` is that of the model, for everything in host memory."""

    def __init__(self, group: ProcessGroup, by_device: Mapping[Any, ProcessGroup] | None = None) -> None:
        self.group = group
        self._by_device = by_device or {}

    def of(self, tensor: Any) -> ProcessGroup:
        """Return the group that moves a tensor."""
        return self._by_device.get(tensor.device, self.group)


def needs_further_groups(group: ProcessGroup, devices: Sequence[Any]) -> bool:
    """Return whether a module on these devices needs other groups than that of the model."""
    return len(devices) > 1 and isinstance(group.backends.get("cuda"), NcclBackend)


def make_groups(group: ProcessGroup, devices: Sequence[Any]) -> DeviceGroups:
    """Return the groups of a module on these devices. All ranks call it where further groups are needed."""
    if not needs_further_groups(group, devices):
        return DeviceGroups(group)
    known = _MADE.setdefault(group, {})
    numbers = gather(group, [device.index for device in devices])
    by_device = {}
    for device, of_ranks in zip(devices, zip(*numbers, strict=True), strict=True):
        if of_ranks not in known:
            known[of_ranks] = _make_group(group, len(known))
        by_device[device] = known[of_ranks]
    return DeviceGroups(group, by_device)


def _make_group(group: ProcessGroup, count: int) -> ProcessGroup:
    # Read anew: the group itself may be bound to one GPU, by device_id.
    config = registry.parse(group.backend_config)
    made = group.make_subgroup(
        range(group.size()),
        op="DistributedDataParallel",
        group_name=f"{group.group_name}:GPUs {count}",
        timeout=group.timeout,
        group_desc="a GPU of each rank",
        backend=(group.name(), group.backend_config, config.make_backends),
    )
    exit_hooks.adopt(made, group)
    return made
