"""procgroup in the place of torch's NCCL: a program that says "nccl" runs unchanged, and its backend is still so named.

torch makes an NCCL group by ProcessGroupNCCL(store, rank, size, options), where a build without CUDA has no such class.
NCCL still moves the tensors on GPUs, on procgroup's engine: with its checks, and its errors that name ranks.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as distributed
from torch.distributed import distributed_c10d

from procgroup.api.options import NCCL_TIMEOUT
from procgroup.torch_plugin import replaced
from procgroup.torch_plugin.creation import configuration, create, make
from procgroup.torch_plugin.process_group import TorchProcessGroup, takes_backends

_Nccl: Any = getattr(distributed_c10d, "ProcessGroupNCCL", None)


class _NcclOptions:
    """What torch takes for its ProcessGroupNCCL.Options. ``config`` has the options of NCCL that were chosen."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from: Any = None
        self.split_color = 0
        self._timeout = NCCL_TIMEOUT


class NamedNccl(TorchProcessGroup):
    """What is called "nccl" everywhere, with the further methods of torch's ProcessGroupNCCL that programs call."""

    Options = _NcclOptions

    @property
    def uid(self) -> int:
        """A number of the group within this process."""
        return id(self)

    @property
    def mem_allocator(self) -> Any:
        """The allocator of NCCL's memory for ``torch.cuda.MemPool``."""
        return self.group.mem_allocator

    def register_mem_pool(self, pool: Any) -> None:
        """Register the pool's memory with NCCL; see procgroup's ProcessGroup.register_mem_pool."""
        self.group.register_mem_pool(pool)

    def deregister_mem_pool(self, pool: Any) -> None:
        """Do nothing: the memory is given up with the group."""

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Do nothing: a call's timeout counts from the call, not from the end of those before it."""

    def _is_initialized(self) -> bool:
        return True

    def _group_start(self) -> None:
        """Do nothing, as ``_group_end``: procgroup aborts its communicators together by itself."""

    _group_end = _group_start


class _NcclKind(type(TorchProcessGroup)):  # type: ignore[misc]
    """Has the constants and the static methods of torch's own class, whose groups count too."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Nccl, name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or (_Nccl is not None and isinstance(instance, _Nccl))


class InPlaceOfNccl(NamedNccl, metaclass=_NcclKind):
    """What torch up to 2.14 takes for its ProcessGroupNCCL."""

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)
        self.options = self.Options() if options is None else options
        self.options.split_from = None  # torch copies the options for groups that it splits off
        members = list(self.options.global_ranks_in_group) or list(range(size))
        config = configuration(self.options)
        group = make(store, rank, members, self.options.group_name, self.options._timeout, config)
        self.bind(group, store, name="nccl", members=members)


def replace() -> None:
    """Let torch make procgroup's groups where it would make NCCL's. Idempotent."""
    replaced.add("nccl")
    if not isinstance(distributed_c10d.default_pg_nccl_timeout, timedelta):
        distributed_c10d.default_pg_nccl_timeout = NCCL_TIMEOUT
    if takes_backends():
        distributed.Backend._plugins["NCCL"] = distributed.Backend._BackendPlugin(_create, True)
    else:
        distributed_c10d._NCCL_AVAILABLE = True
        distributed_c10d.ProcessGroupNCCL = distributed.ProcessGroupNCCL = InPlaceOfNccl


def _create(options: Any, backend_options: Any = None) -> Any:
    group = create(options, backend_options, name="nccl", kind=NamedNccl)
    group.options = NamedNccl.Options() if backend_options is None else backend_options
    return group
