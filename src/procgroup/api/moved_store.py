"""A new store for the remaining ranks after rank 0, which hosted the old store, is lost or excluded.

The lowest remaining rank hosts it, at the address of its former listener, and announces it over the existing
connections. NCCL's communicators use it, and programs get it from ``get_group_store``.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from procgroup.errors import DistNetworkError
from procgroup.rendezvous import hosting
from procgroup.stores.store import Store

if TYPE_CHECKING:
    from procgroup.groups.engine import GroupEngine

_BYTES = 1024
"""The size of an announcement."""
_ATTEMPT_SECONDS = 1.0
"""How long a rank tries to connect before it looks whether another one is lost."""


def open_store(engine: GroupEngine, rank: int, old: Store, timeout: timedelta) -> Store:
    """Return a store that rank 0 of a group hosts, connected; all ranks of the group call it, with their group ranks.

    ``old`` is the store that they had: the ranks reach each other as they reached its host. Raises PeerLost where a
    rank is lost meanwhile, DistNetworkError where the new store is not reached in ``timeout``.
    """
    # Not above: a world of 1 does without them.
    from procgroup.backends.peer_network import route_to
    from procgroup.stores.tcp import TCPStore

    limit = timeout.total_seconds()
    deadline = time.monotonic() + limit
    route = route_to(old)
    announced = np.zeros(_BYTES, np.uint8)
    hosted = None
    if rank == 0:
        hosted, job_key = hosting.host_announced_store(route.listening_host, limit)
        text = f"{hosted.port},{job_key},{route.local}".encode()
        announced[: len(text)] = np.frombuffer(text, np.uint8)
    engine.calls.broadcast(announced, 0, False, limit)
    if hosted is not None:
        return hosted
    port, job_key, address = announced.tobytes().rstrip(b"\0").decode().split(",")
    if job_key:
        hosting.use_job_key(job_key)
    while True:
        seconds = min(max(deadline - time.monotonic(), 0.0), _ATTEMPT_SECONDS)
        try:
            store = TCPStore(
                route.address_of(address), int(port), is_master=False, timeout=seconds, wait_for_workers=False
            )
        except DistNetworkError:
            if time.monotonic() >= deadline:
                raise
            if engine.calls.has_lost_member:
                engine.calls.barrier(False, limit)  # which raises the error for it
        else:
            store.set_timeout(limit)
            return store
