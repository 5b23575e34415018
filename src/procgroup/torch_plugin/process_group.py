"""A torch ProcessGroup subclass, the form in which torch up to 2.14 accepts a Python backend.

From 2.15 on torch also looks for a Backend in a process group. It carries torch's hooks and the other features that
``PyProcessGroup`` lacks. It is not used without the subclass, in a process group of torch's: the works of such a group
hide all of a Python work but ``wait`` and its future, and would report that a call has never completed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch._C._distributed_c10d import Backend

from procgroup.api import exit_hooks
from procgroup.arrays.untraced import untraced
from procgroup.backends.nccl import NcclBackend
from procgroup.errors import DistBackendError
from procgroup.groups.group import ProcessGroup
from procgroup.torch_plugin.calls import TorchCalls
from procgroup.torch_plugin.devices import OtherDevices

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")


@functools.cache
def takes_backends() -> bool:
    """Return whether this torch lets Python make a Backend: some have the class, and no constructor."""
    try:
        Backend.__init__(Backend.__new__(type("Probe", (Backend,), {})), 0, 1)
    except TypeError:
        return False
    return True


@untraced
class TorchBackend(TorchCalls, Backend):  # type: ignore[misc, unused-ignore]
    """A torch Backend for CPU tensors around ``group``, one of procgroup's."""

    def __init__(self, group: ProcessGroup, *, name: str) -> None:
        Backend.__init__(self, group.rank(), group.size())
        self.group = group
        self._name = name

    def shutdown(self) -> None:
        """Leave in order; what was sent still arrives. Idempotent."""
        exit_hooks.leave(self.group)

    def abort(self) -> None:
        """Make every call in progress fail at once on this rank, and notify the others. Idempotent."""
        self.group.abort()


@untraced
class TorchProcessGroup(TorchCalls, distributed.ProcessGroup):  # type: ignore[misc]
    """A torch ProcessGroup around ``group``, one of procgroup's; made with its rank and size, then bound to it."""

    options: Any = None
    """Those that torch copies for groups that are split off this one."""

    def bind(self, group: ProcessGroup, store: Any, *, name: str, members: Sequence[int]) -> None:
        """Use a group, torch's store with its keys, the backend's name, and its members' global ranks."""
        self.group = group
        self._store = store
        self._name = name
        self._group_name = group.group_name
        self._group_desc = "undefined"
        self._other_devices = OtherDevices(self, store, group.timeout, list(members))
        if takes_backends():
            backend = TorchBackend(group, name=name)
            self._set_default_backend(distributed.ProcessGroup.BackendType.CUSTOM)
            for device in (_CPU, _CUDA):
                self._register_backend(device, distributed.ProcessGroup.BackendType.CUSTOM, backend)

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name by which torch knows the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name by which torch knows the group; errors show it."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._group_desc

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set what the group is for."""
        self._group_desc = description

    def get_group_store(self) -> Any:
        """Return torch's store that the group's ranks share."""
        return self._store

    @property
    def _device_types(self) -> list[Any]:
        own = [_CPU, _CUDA] if torch.cuda.is_available() else [_CPU]
        return own + [device for kind in self._other_devices.kinds() if (device := torch.device(kind)) not in own]

    def _get_backend(self, device: Any) -> Any:
        if device.type == "cpu":
            return self
        other = self._other_devices.group_of(device)
        if other is not None:
            return other._get_backend(device)
        if device.type != "cuda":
            raise DistBackendError(
                f"group {self._group_name} has no backend for tensors on {device.type}. "
                f"Name one: init_process_group('cpu:{self._name},{device.type}:...')."
            )
        return self

    def eager_connect_single_device(self, device: Any) -> None:
        """Let NCCL connect the ranks on this GPU now, and not in the first call: ``device_id`` was given to torch."""
        self.bound_device_id = device
        backend = self.group.backends.get(device.type)
        if isinstance(backend, NcclBackend):
            self.group.calls.open_backend(
                lambda root, number: backend.connect(device.index), self.group.timeout.total_seconds()
            )

    def perform_nocolor_split(self, device: Any) -> None:
        """Do nothing: a rank that is not in a new group has no part in its making."""

    def _elsewhere(self, tensor: Any) -> Any | None:
        """Return torch's group for a tensor on a device that has another backend."""
        return self._other_devices.group_of(tensor.device) or super()._elsewhere(tensor)

    def _elsewhere_at(self, device: Any) -> Any | None:
        if device is None or device.type not in self._other_devices.kinds():
            return None
        return self._other_devices.group_of(device)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Any:
        """Make a group of some of this group's ranks; None on a rank that is not among them."""
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self._group_name}:split:{list(ranks)}"
        made = self.group.make_subgroup(
            ranks,
            op="split_group",
            group_name=name,
            timeout=timeout or self.group.timeout,
            group_desc=group_desc or f"{self._group_desc}:split",
        )
        exit_hooks.adopt(made, self.group)
        store = distributed.PrefixStore(f"{name}/", self._store)
        split = TorchProcessGroup(made.rank(), made.size())
        split.bind(made, store, name=self._name, members=made.members)
        split.setGroupDesc(made.group_desc)
        return split

    splitGroup = split_group  # noqa: N815

    def merge_remote_group(self, *_arguments: Any, **_named: Any) -> Any:
        """Refuse: a group keeps the ranks it was made of."""
        raise DistBackendError(
            f"group {self._group_name}: backend {self._name!r} cannot merge groups. "
            "Call init_process_group with all ranks instead."
        )

    def shutdown(self) -> None:
        """Leave in order; what was sent still arrives. Idempotent."""
        self._other_devices.shutdown()
        exit_hooks.leave(self.group)

    def abort(self) -> None:
        """Make every call in progress fail at once on this rank, and notify the others. Idempotent."""
        self._other_devices.abort()
        self.group.abort()

    def __repr__(self) -> str:
        return f"<TorchProcessGroup {self._group_name}: {self._name}, rank {self.rank()} of {self.size()}>"
