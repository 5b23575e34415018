"""The devices of a wrapped module: the CPU, one GPU, or several GPUs; the groups that move tensors on them; the inputs.

The group of the model moves the tensors of every device, with one exception: a group with NCCL stays on the GPU of its
first call. A module on several GPUs therefore has a further group for each GPU, among the same ranks. These groups end
with the model's group, and all models with the same GPUs share them.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from procgroup.api import exit_hooks
from procgroup.backends import registry
from procgroup.backends.nccl import NcclBackend
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.ddp.captured_steps import require_on_gpu
from procgroup.parallel.pytorch import torch
from procgroup.parallel.rank_comparison import gather

# By group, and by the numbers of a GPU on all ranks.
_MADE: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = weakref.WeakKeyDictionary()


class Devices(NamedTuple):
    """The devices of a module's parameters, in the order of the parameters; ``ids`` and ``output`` as in torch."""

    all: tuple[Any, ...]
    ids: list[int] | None
    output: int | None

    @property
    def on_gpus(self) -> bool:
        """Whether the parameters are on GPUs."""
        return bool(self.all[0].type == "cuda")

    def take_in(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of a forward on the GPU of ``device_ids``; unchanged without device_ids."""
        if self.ids is None:
            return inputs, kwargs
        return _moved(inputs, self.all[0]), _moved(kwargs, self.all[0])


def choose_devices(
    named_parameters: Sequence[tuple[str, Any]], device_ids: Sequence[Any] | None, output_device: Any
) -> Devices:
    """Return the devices of a module with these parameters.

    Raises ValueError, as torch does, for parameters on different kinds of devices and for ``device_ids`` or
    ``output_device`` with a module that is not on one GPU; also for a GPU that is not the parameters', and for a
    module that is neither on the CPU nor on CUDA's GPUs.
    """
    found = tuple(dict.fromkeys(parameter.device for _, parameter in named_parameters))
    shown = ", ".join(map(str, found))
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element, but got {device_ids}.")
    if len({device.type for device in found}) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but its parameters are on "
            f"{shown}."
        )
    if found[0].type not in ("cpu", "cuda"):
        raise ValueError(
            f"DistributedDataParallel averages gradients in the memory of CPUs and CUDA's GPUs, but the module is on "
            f"{shown}. Move the module there."
        )
    if not device_ids and output_device is None:
        return Devices(found, None, None)
    if not device_ids or len(found) > 1 or found[0].type == "cpu":
        advice = "pass device_ids too" if found[0].type == "cuda" and len(found) == 1 else "leave both out"
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with modules on a single GPU, "
            f"and output_device only with device_ids, but got device_ids {device_ids}, output_device {output_device}, "
            f"and module parameters on {shown}: {advice}."
        )
    index = _index_of(device_ids[0], "device_ids")
    if index != found[0].index:
        raise ValueError(
            f"device_ids means GPU {index}, but the parameters of the module are on {shown}. Move the module with "
            f"module.to('cuda:{index}') before you wrap it, or pass device_ids=[{found[0].index}]."
        )
    return Devices(found, [index], index if output_device is None else _index_of(output_device, "output_device"))


def _index_of(given: Any, name: str) -> int:
    """Return the number of a GPU that is given as a number, a text such as "cuda:1", or a torch.device."""
    if isinstance(given, int):
        return given
    device = torch.device(given)
    if device.type != "cuda":
        raise ValueError(f"Expected {name} to be a GPU's number, or a device such as 'cuda:0', got {given!r}.")
    return int(torch.cuda.current_device() if device.index is None else device.index)


def _moved(value: Any, device: Any) -> Any:
    """Return a value with its tensors on a device: those in tuples, lists, mappings and dataclasses, too."""
    if isinstance(value, (torch.Tensor, torch.nn.utils.rnn.PackedSequence)):
        require_on_gpu(value)
        return value.to(device)  # in order with the current stream of the device
    if isinstance(value, (tuple, list)):
        entries = [_moved(entry, device) for entry in value]
        if hasattr(value, "_fields"):
            return type(value)(*entries)
        return tuple(entries) if isinstance(value, tuple) else entries
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        made: Any = copy.copy(value)
        for key, entry in value.items():
            made[key] = _moved(entry, device)
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _moved(getattr(value, name), device) for name in fields})
    return value


class DeviceGroups:
    """The groups by device; ``group`` is that of the model, for everything in host memory.

    After a lost rank ``group`` is replaced for all parts of the model, which share this object.
    """

    def __init__(self, group: ProcessGroup, by_device: Mapping[Any, ProcessGroup] | None = None) -> None:
        self.group: ProcessGroup = group
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
