"""procgroup in Gloo's place: a program that says "gloo" runs unchanged, and its backend is still named "gloo".

torch up to 2.14 makes a Gloo group by ProcessGroupGloo(store, rank, size, timeout), then sets the group's global ranks
in ``options`` and has the group agree on a sequence number. The group connects there, where its ranks are known.
From 2.15 on Gloo is a plug-in among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed import distributed_c10d

from procgroup.errors import CollectiveTimeout
from procgroup.groups.group import ProcessGroup
from procgroup.stores import tcp
from procgroup.torch_plugin import meeting, rendezvous_patch, replaced
from procgroup.torch_plugin.creation import WITHOUT_NCCL, create, make
from procgroup.torch_plugin.process_group import TorchProcessGroup, takes_backends
from procgroup.types import DEFAULT_TIMEOUT

# What starting a group loads: ranks that are forked find it loaded.
_OF_A_START = (meeting, rendezvous_patch, tcp)
_Gloo = distributed_c10d.ProcessGroupGloo


class NamedGloo(TorchProcessGroup):
    """What is called "gloo" everywhere, and fails in Gloo's words too, which programs look for."""

    def bind(self, group: ProcessGroup, store: Any, *, name: str, members: Sequence[int]) -> None:
        super().bind(group, store, name=name, members=members)
        kind = distributed_c10d.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("meta"), kind, _for_the_log())

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend's name for torch's C++ code too: there is what that takes for its own Gloo."""
        return "gloo"

    def _gathered(self, output_tensors: Any) -> Any:
        """Return the ranks' tensors as Gloo's futures give them: in one list."""
        return [tensor for tensors in output_tensors for tensor in tensors]

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has come here; otherwise raise what names those who did not, in Gloo's words too."""
        try:
            super().monitored_barrier(timeout, wait_all_ranks)
        except CollectiveTimeout as error:
            error.args = (f"{error} In Gloo's words: {_words(error, wait_all_ranks)}.",)
            raise


class _GlooKind(type(TorchProcessGroup)):  # type: ignore[misc]
    """Counts torch's own Gloo groups too: torch's RPC makes one for itself, and asks what it is by this class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, _Gloo)


class InPlaceOfGloo(NamedGloo, metaclass=_GlooKind):
    """What torch up to 2.14 takes for its ProcessGroupGloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, size)
        self._place = rank, size
        self._store = store
        self._timeout = timeout
        self.options: Any = _options(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Connect with the other ranks: torch calls this once, when it has filled in ``options``."""
        rank, size = self._place
        members = list(self.options.global_ranks_in_group) or list(range(size))
        group = make(self._store, rank, members, self.options.group_name, self._timeout, WITHOUT_NCCL)
        self.bind(group, self._store, name="gloo", members=members)


def _words(error: CollectiveTimeout, wait_all_ranks: bool) -> str:
    """Say what Gloo says, which programs look for in the text of the error."""
    if error.rank != 0:
        what = "but received errors while waiting for send/recv from rank 0"
        return f"Rank {error.rank} successfully reached monitoredBarrier, {what}"
    if error.seconds == 0:
        return "Rank 0 timed out in monitoredBarrier"
    if wait_all_ranks and len(error.missing) > 1:
        return f"Ranks {', '.join(map(str, error.missing))} failed to pass monitoredBarrier"
    return f"Rank {error.missing[0]} failed to pass monitoredBarrier"


@cache
def _for_the_log() -> Any:
    """Return a one-process Gloo group, used only for its number of threads.

    Stock DDP writes their number to its log where a group is called "gloo", and takes the group for Gloo's then.
    """
    options = _Gloo._Options()
    options._devices = [_Gloo.create_device(hostname="127.0.0.1")]
    return _Gloo(distributed.HashStore(), 0, 1, options)


def replace() -> None:
    """Let torch make procgroup's groups where it would make Gloo's. Idempotent."""
    replaced.add("gloo")
    if takes_backends():
        distributed.Backend._plugins["GLOO"] = distributed.Backend._BackendPlugin(_create, True)
    else:
        distributed_c10d.ProcessGroupGloo = InPlaceOfGloo
    with suppress(ImportError):  # without the engine, making a group says what is missing
        # Load it now, once, for all ranks that the program forks.
        import procgroup.backends.native  # noqa: F401


def _create(options: Any, backend_options: Any = None) -> Any:
    group = create(options, name="gloo", kind=NamedGloo, by_nccl=False)
    group.options = _options(options.timeout)
    return group


def _options(timeout: timedelta) -> Any:
    """Return Gloo's own options, which programs ask for the timeout."""
    options = _Gloo._Options()
    options._timeout = timeout
    return options
