"""The other backend of a kind of device, as given to init_process_group.

With "cpu:procgroup,cuda:nccl" torch hands the whole group to procgroup. So procgroup makes a process group of torch's
own around ProcessGroupNCCL, at the first tensor on a GPU, and passes its calls on.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed import distributed_c10d

from procgroup import torch_plugin
from procgroup.errors import DistBackendError


class OtherDevices:
    """torch's process groups for other devices than the CPU, beside one of the plug-in; each made at its first use."""

    def __init__(self, group: Any, store: Any, timeout: timedelta, members: list[int]) -> None:
        self._owner = weakref.ref(group)  # so that torch's store, and its server, end with the last use of the group
        self._store = store
        self._timeout = timeout
        self._members = members
        self._made: dict[str, Any] = {}
        self._without: set[str] = set()
        self._in_the_making: str | None = None

    @property
    def _group(self) -> Any:
        return self._owner()

    def kinds(self) -> list[str]:
        """Return the kinds of device that have a backend of their own, but for one whose backend is just made."""
        own, making = self._group.name(), self._in_the_making
        return [kind for kind, name in self._configured().items() if name != own and kind != making]

    def group_of(self, device: Any) -> Any | None:
        """Return torch's group for a device; None where no other backend was named for it."""
        kind = device.type
        if kind in self._without:  # each call on a GPU asks
            return None
        if kind not in self._made:
            configured = self._configured()
            if configured.get(kind) in (None, self._group.name()):
                if configured:
                    self._without.add(kind)
                return None
            self._in_the_making = kind
            try:
                self._made[kind] = self._make(kind)
            finally:
                self._in_the_making = None
        return self._made[kind]

    def shutdown(self) -> None:
        """End the groups that were made."""
        for group in self._made.values():
            group.shutdown()

    def abort(self) -> None:
        """Make the calls of the groups that were made fail."""
        for group in self._made.values():
            group.abort()

    def _configured(self) -> dict[str, str]:
        """Return the backend's name for each kind of device. torch keeps it, and knows it once the group is made."""
        config = distributed_c10d._world.pg_backend_config.get(self._group)
        return {} if config is None else dict(part.split(":") for part in str(config).split(","))

    def _make(self, kind: str) -> Any:
        name = self._configured()[kind]
        store = distributed.PrefixStore(f"{kind}/", self._store)
        if name in torch_plugin.replaced:
            return self._of_procgroup(name, kind, store)
        backend = self._nccl(store) if name == "nccl" else self._of_plugin(name, kind, store)
        group = distributed.ProcessGroup(store, self._group.rank(), self._group.size())
        type_of_backend = distributed.Backend.backend_type_map[name]
        group._set_default_backend(type_of_backend)
        group._register_backend(torch.device(kind), type_of_backend, backend)
        group._set_group_name(f"{self._group.group_name}:{kind}")
        group._set_group_desc(self._group.group_desc)
        return group

    def _of_procgroup(self, name: str, kind: str, store: Any) -> Any:
        from procgroup.torch_plugin import creation  # which imports this module

        facts = self._facts(store)
        facts.group_id = f"{facts.group_id}:{kind}"
        return creation.create(facts, name=name, by_nccl=name == "nccl")

    def _nccl(self, store: Any) -> Any:
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.global_ranks_in_group = self._members
        options.group_name = self._group.group_name
        return distributed.ProcessGroupNCCL(store, self._group.rank(), self._group.size(), options)

    def _of_plugin(self, name: str, kind: str, store: Any) -> Any:
        plugin = distributed.Backend._plugins.get(name.upper())
        if plugin is None:
            raise DistBackendError(
                f"group {self._group.group_name}: backend {name!r} for {kind} tensors cannot stand beside procgroup. "
                f"Name nccl, procgroup or a backend that a package has registered: 'cpu:procgroup,{kind}:...'."
            )
        if not plugin.extended_api:
            return plugin.creator_fn(store, self._group.rank(), self._group.size(), self._timeout)
        return plugin.creator_fn(self._facts(store), None)

    def _facts(self, store: Any) -> Any:
        """Return what torch tells a plug-in that makes a group."""
        facts = distributed_c10d._DistributedBackendOptions()
        facts.store = store
        facts.group_rank = self._group.rank()
        facts.group_size = self._group.size()
        facts.timeout = self._timeout
        facts.group_id = self._group.group_name
        facts.global_ranks_in_group = self._members
        return facts
