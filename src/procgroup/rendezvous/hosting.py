"""Who hosts the TCP store of a rendezvous, and for how long.

Rank 0 hosts it, unless the launcher does. A process that hosts one keeps it until it exits, also after
destroy_process_group and after an initialisation that failed: a rank that is quicker to initialise
again must find the same store, not one that is about to end. When the process ends with an
exception, the store ends with it, and the others learn of it at once.

Everything about TCPStore is imported when it is needed: a world of 1 does without the native module.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from procgroup import environ, types
from procgroup.stores.store import Store
from procgroup.types import Timeout

if TYPE_CHECKING:
    from procgroup.stores.tcp import TCPStore

_lock = threading.Lock()
_hosted: dict[tuple[int, str, int], TCPStore] = {}


def open_store(host: str, port: int, *, rank: int, timeout: Timeout) -> Store:
    """Return the store at host:port, connected; on rank 0, host it there, unless the launcher does.

    Raises DistNetworkError when the address is taken by another program or is not reached in ``timeout``.
    """
    from procgroup.stores.tcp import TCPStore

    limit = types.seconds(timeout)
    launcher_s = _launcher_s_store(host, port)
    if launcher_s is not None:
        host, port = launcher_s
        if environ.PROCGROUP_STORE_KEY.is_set():
            os.environ[environ.PROCGROUP_JOB_KEY.name] = environ.PROCGROUP_STORE_KEY.get()
    elif rank == 0:
        return host_store(host, port, limit)
    return TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)


def let_go(store: Store) -> None:
    """Close a store that open_store or another rendezvous returned; one that this process hosts stays."""
    with _lock:
        is_hosted = any(store is hosted for hosted in _hosted.values())
    if not is_hosted:
        store.close()


def host_store(host: str, port: int, limit: float) -> TCPStore:
    """Return the store that this process hosts there, the same each time; ``port`` 0 is any free one."""
    from procgroup.stores.tcp import TCPStore

    with _lock:
        place = (os.getpid(), host, port)
        if place not in _hosted:
            _hosted[place] = TCPStore(host, port, is_master=True, timeout=limit, wait_for_workers=False)
        return _hosted[place]


def _launcher_s_store(host: str, port: int) -> tuple[str, int] | None:
    """Return where the launcher hosts the store that this address stands for; None when it hosts none."""
    store = environ.PROCGROUP_STORE.get()
    if not store or (environ.PROCGROUP_MASTER.get() or store) != f"{host}:{port}":
        return None
    name, _, number = store.rpartition(":")
    return name, int(number)
