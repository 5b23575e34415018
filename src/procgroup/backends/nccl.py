"""The backend "nccl": NCCL moves arrays in the memory of GPUs.

Native code makes the calls (native/nccl/nccl_backend.hpp). Here the ranks meet for a *communicator*: with device_id
when the group is made, otherwise when the first call needs it, in a generator that the engine runs as it runs those of
a program's own backend.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from procgroup.backends import nccl_library
from procgroup.errors import DistBackendError, StoreLost
from procgroup.groups.backend import Awaited
from procgroup.process import environ
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.store import Store

if TYPE_CHECKING:
    from procgroup import _native

_ALL = -1
"""In place of the two ranks of a communicator for messages: that of the group's collectives."""
_LOSS_SECONDS = 30.0
"""How long a call goes on after the store is lost: long enough for busy ranks to see who hosted it, and to say so."""


class NcclBackend:
    """The communicators of one group."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        device: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        from procgroup import _native

        self._store, self._rank, self._size = store, rank, size
        self._options, self._device = options or {}, device
        may_gate = environ.PROCGROUP_NCCL_GATE.get()
        has_high_priority = bool(self._options.get(nccl_library.HIGH_PRIORITY))
        number = -1 if device is None else device
        self._native = _native.NcclBackend(rank, size, number, may_gate, has_high_priority)
        self._native.on_first_call(nccl_library.load)
        self._native.on_connect(self._connect)

    def attach(self, calls: _native.Group) -> None:
        calls.set_backend(self._native)

    def close(self, failed: bool) -> None:
        self._native.close(failed)

    def connect(self, device: int) -> Iterator[Awaited]:
        """Make the communicator of collectives, on this GPU, before the first call; a generator as Backend.open."""
        self._native.load()
        self._native.use(device)
        yield from self._connect(_ALL, _ALL)

    def _connect(self, first: int, second: int) -> Iterator[Awaited]:
        """Connect the ranks of a communicator, which meet at the store; a generator as Backend.move.

        Raises DistBackendError on all ranks where two of them use one GPU, and for NCCL's errors, and StoreLost.
        """
        try:
            yield from self._meet(first, second)
        except StoreLost:
            # The rank that hosts it may be lost: the call ends as soon as the engine has seen that, and names it.
            until = time.monotonic() + _LOSS_SECONDS
            while time.monotonic() < until:
                yield None
            raise

    def _meet(self, first: int, second: int) -> Iterator[Awaited]:
        from procgroup import _native

        ranks = list(range(self._size)) if first == _ALL else [first, second]
        store = PrefixStore("all" if first == _ALL else f"{first}-{second}", self._store)
        rank = ranks.index(self._rank)
        library = nccl_library.load()
        if rank == 0:
            store.set("id", library.make_id())
        store.set(f"gpu/{rank}", f"{_host()} {_native.gpu_uuid(self._native.device)}")
        gpus = []
        for place, group_rank in enumerate(ranks):
            while not store.check([f"gpu/{place}", "id"]):
                yield group_rank
            gpus.append(store.get(f"gpu/{place}").decode())
        _require_own_gpus(gpus, ranks)
        configuration = nccl_library.configuration(self._options)
        made = self._native.make_communicator(rank, len(ranks), store.get("id"), configuration)
        while not made.is_connected:
            yield None
        self._native.set_communicator(first, second, made)


class EagerNcclBackend(NcclBackend):
    """The same on a GPU that is known before the first call: its communicator is made together with the group."""

    def open(self) -> Iterator[Awaited]:
        assert self._device is not None
        yield from self.connect(self._device)


def _host() -> str:
    """Return what tells this host apart from others; NCCL reads the same variable."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def _require_own_gpus(gpus: list[str], ranks: list[int]) -> None:
    """Raise DistBackendError where two ranks use one GPU. All ranks find the same."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0"):
        return
    for place, gpu in enumerate(gpus):
        if (other := gpus.index(gpu)) != place:
            raise DistBackendError(
                f"NCCL needs a GPU for each rank, but ranks {ranks[other]} and {ranks[place]} use the same one of host "
                f"{gpu.split()[0]}: use arrays on the GPU of this rank, or pass device_id to init_process_group. "
                f"NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU, from NCCL 2.30 on."
            )
