"""env://: the rank, the world size and the store's address come from the environment.

That is how launchers tell a process its place. Rank 0 hosts the store at MASTER_ADDR:MASTER_PORT, unless
the launcher already does (PROCGROUP_STORE), or torchrun's agent has a store of its own there (agent_store).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from procgroup import environ
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

    A world of 1 needs no address and touches no network. Raises ValueError that names a missing variable.
    """
    rank, world_size = place.from_query(url)
    given = {environ.RANK.name: rank, environ.WORLD_SIZE.name: world_size}
    rank = environ.RANK.get() if rank is None else rank
    world_size = environ.WORLD_SIZE.get() if world_size is None else world_size
    if rank is None or world_size is None:
        raise ValueError(_missing(given))
    place.check(rank, world_size)
    if world_size == 1:
        from procgroup.stores.hash import HashStore

        yield HashStore(), rank, world_size
        return
    host, port = environ.MASTER_ADDR.get(), environ.MASTER_PORT.get()
    if not host or port is None:
        raise ValueError(_missing(given))
    if environ.TORCHELASTIC_USE_AGENT_STORE.get():
        from procgroup.rendezvous import agent_store

        store = agent_store.open_store(host, port, rank=rank, world_size=world_size, timeout=timeout)
    else:
        store = hosting.open_store(host, port, rank=rank, timeout=timeout)
    yield store, rank, world_size


def _missing(given: dict[str, int | None]) -> str:
    missing = [variable.name for variable in _NEEDED if given.get(variable.name) is None and not variable.is_set()]
    shown = [f"{variable.name}={variable.get()}" for variable in _NEEDED if variable.is_set()]
    also = f" (also missing: {', '.join(missing[1:])})" if missing[1:] else ""
    return (
        "Error initializing procgroup using env:// rendezvous: "
        f"environment variable {missing[0]} expected, but not set{also}; "
        f"set are: {', '.join(shown) or 'none of them'}. "
        "Start the ranks with `procgroup run --nproc-per-node N script.py`, which sets them all, or set them, or pass "
        "rank=, world_size= and init_method='tcp://host:port'."
    )
