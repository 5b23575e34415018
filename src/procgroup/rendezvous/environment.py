"""env://: the rank, the world size and the store's address come from the environment.

That is how launchers tell a process its place. Rank 0 hosts the store at MASTER_ADDR:MASTER_PORT, unless
the launcher already does (PROCGROUP_STORE), or torchrun's agent has a store of its own there (agent_store).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from procgroup import environ
from procgroup.errors import IncompleteEnvironment
from procgroup.rendezvous import hosting, place
from procgroup.stores.store import Store
from procgroup.types import DEFAULT_TIMEOUT, Timeout

_NEEDED: tuple[environ.Variable[Any], ...] = (
    environ.RANK,
    environ.WORLD_SIZE,
    environ.MASTER_ADDR,
    environ.MASTER_PORT,
)


def env_rendezvous(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size) from the environment; the URL's query wins over it.

    A world of 1 needs no address and touches no network. Raises IncompleteEnvironment, a ValueError, when
    variables are missing: it names them, the launcher that was detected, and what to write.
    """
    rank, world_size = place.from_query(url)
    rank = environ.RANK.get() if rank is None else rank
    world_size = environ.WORLD_SIZE.get() if world_size is None else world_size
    if rank is None or world_size is None:
        raise _missing(rank, world_size)
    place.check(rank, world_size)
    if world_size == 1:
        from procgroup.stores.hash import HashStore

        yield HashStore(), rank, world_size
        return
    host, port = environ.MASTER_ADDR.get(), environ.MASTER_PORT.get()
    if not host or port is None:
        raise _missing(rank, world_size)
    if environ.TORCHELASTIC_USE_AGENT_STORE.get() and not hosting.is_launcher_s(host, port):
        from procgroup.rendezvous import agent_store

        store = agent_store.open_store(host, port, rank=rank, world_size=world_size, timeout=timeout)
    else:
        store = hosting.open_store(host, port, rank=rank, timeout=timeout)
    yield store, rank, world_size


def _missing(rank: int | None, world_size: int | None) -> IncompleteEnvironment:
    # Needed for the error only, and importing them would make every start of a group slower.
    from procgroup.cluster import task_launcher
    from procgroup.rendezvous import start_advice

    found = {variable.name: os.environ[variable.name] for variable in _NEEDED if variable.is_set()}
    for variable, passed in ((environ.RANK, rank), (environ.WORLD_SIZE, world_size)):
        if passed is not None and variable.name not in found:
            found[variable.name] = str(passed)
    task = task_launcher.detect()
    return IncompleteEnvironment(
        missing=[variable.name for variable in _NEEDED if variable.name not in found],
        found=found,
        launcher=task.launcher.name if task is not None else "",
        advice=start_advice.advice(task, found),
    )
