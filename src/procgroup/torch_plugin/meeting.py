"""Where the ranks of a group meet: at a store of procgroup's, whose address group rank 0 writes into torch's store.

torch's TCPStore does not see that the process of a rank has ended, and procgroup's does: so a rank that is lost while
the group starts is named at once (stores/start_up.py)::

    rank r    write here/r                                                torch's store
    rank 0    host a store on a free port, write its address to "store"
    rank r    read "store" and connect; empty here/r

When a rank does not come, the others are named by what they have written. Where torch's store is no TCPStore, nothing
says how rank 0 is reached: it writes "", and the ranks meet in torch's store itself.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any

import torch.distributed as distributed

from procgroup import types
from procgroup.errors import DistError, DistNetworkError, RendezvousTimeout
from procgroup.errors.texts import name_ranks
from procgroup.rendezvous.agent_store import host_of_this_process, host_recorded_store, join_recorded_store
from procgroup.stores.store import Store
from procgroup.torch_plugin.rendezvous_patch import FAILED, HERE, PREFIX, read_failure
from procgroup.torch_plugin.store import TorchStore
from procgroup.types import Endpoint, Timeout

_STORE = f"{PREFIX}store"
_LOOK_SECONDS = 0.25
_PAUSE_SECONDS = 0.01


def open_store(store: Any, rank: int, size: int, timeout: Timeout) -> Store:
    """Return the store where the ranks meet; close it when they have met.

    Raises RendezvousTimeout, which names the ranks that have not come, DistNetworkError when a store is not reached.
    """
    meeting = _PluginMeeting(TorchStore(store), rank, size, types.seconds(timeout))
    if size == 1:
        return meeting.torchs
    try:
        return meeting.open()
    except DistError:
        raise
    except RuntimeError as error:
        raise meeting.lost(error) from error


class _PluginMeeting:
    def __init__(self, torchs: TorchStore, rank: int, size: int, limit: float) -> None:
        self.torchs = torchs
        self.rank = rank
        self.size = size
        self.limit = limit
        self.deadline = time.monotonic() + limit
        self.joined: dict[int, str] = {}

    def open(self) -> Store:
        sign = f"{HERE}{self.rank}"
        self.torchs.set(sign, socket.gethostname())
        store = self._host() if self.rank == 0 else self._join()
        self.torchs.set(sign, "")  # which counts for no later start at the same store
        return store

    def lost(self, error: Exception) -> DistNetworkError:
        """Return the error for torch's store, which has ended: it does so with the process of rank 0."""
        missing = f"; {name_ranks(self._timeout().missing)} had not come" if self.joined else ""
        return DistNetworkError(
            f"rank {self.rank} of {self.size} has lost torch's store in init_process_group{missing}. Rank 0 hosts it, "
            f"unless torchrun does: look at what has ended there. torch says: {str(error).partition(chr(10))[0]}"
        )

    def _host(self) -> Store:
        below: Any = self.torchs.underlying_store
        while isinstance(below, distributed.PrefixStore):
            below = below.underlying_store
        if isinstance(below, distributed.TCPStore):
            with suppress(DistNetworkError):  # no address of this host is known: meet in torch's store
                host = host_of_this_process(Endpoint(below.host, below.port))
                store, record = host_recorded_store(host, self.limit)
                self.torchs.set(_STORE, record)
                return store
        self.torchs.set(_STORE, "")
        return self.torchs

    def _join(self) -> Store:
        rank = f"rank {self.rank} of {self.size}"
        return join_recorded_store(self._read, rank, "torch's store", self.limit, self.deadline) or self.torchs

    def _read(self) -> dict[str, Any]:
        """Wait for rank 0's record, and return it; empty where the ranks meet in torch's store."""
        looked = 0.0
        while not self.torchs.check([_STORE]):
            if self.torchs.check([FAILED]):  # in torch's own wait for all ranks
                raise read_failure(self.torchs.get(FAILED).decode())
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS or now >= self.deadline:
                looked = now
                self._look()
            if now >= self.deadline:
                raise self._timeout()
            time.sleep(_PAUSE_SECONDS)  # torch's own wait is not ended by Ctrl-C
        text = self.torchs.get(_STORE).decode()
        record: dict[str, Any] = json.loads(text) if text else {}
        return record

    def _look(self) -> None:
        """Read who has come."""
        for rank in range(self.size):
            if rank in self.joined or not self.torchs.check([f"{HERE}{rank}"]):
                continue
            if host := self.torchs.get(f"{HERE}{rank}").decode(errors="replace"):
                self.joined[rank] = host

    def _timeout(self) -> RendezvousTimeout:
        missing = [rank for rank in range(self.size) if rank not in self.joined] or [0]
        return RendezvousTimeout(missing=missing, joined=self.joined, size=self.size, seconds=self.limit)
