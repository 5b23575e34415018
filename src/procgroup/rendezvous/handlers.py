"""The handler table: which scheme of a URL is served by which function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from procgroup.rendezvous.environment import env_rendezvous
from procgroup.rendezvous.tasks import mpi_rendezvous, slurm_rendezvous
from procgroup.rendezvous.urls import file_rendezvous, tcp_rendezvous
from procgroup.stores.store import Store

Handler = Callable[..., Iterator[tuple[Store, int, int]]]

_handlers: dict[str, Handler] = {
    "env": env_rendezvous,
    "file": file_rendezvous,
    "mpi": mpi_rendezvous,
    "slurm": slurm_rendezvous,
    "tcp": tcp_rendezvous,
}


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Let ``handler(url, **kwargs)`` serve the URLs of ``scheme``; it yields (store, rank, world size).

    Rank and world size that a caller gives are in the URL's query. Raises RuntimeError when the scheme is taken.
    """
    if scheme in _handlers:
        raise RuntimeError(f"Rendezvous handler for {scheme}:// already registered")
    _handlers[scheme] = handler


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size) for a URL of a scheme: env, tcp, file, slurm, mpi, or a registered one.

    ``rank`` and ``world_size``, when not -1, win over the URL's query, and that wins over the environment.
    ``timeout`` (timedelta or seconds) says how long to wait for the store. Raises TypeError for arguments
    of a wrong type, RuntimeError for an unknown scheme, ValueError for a URL that lacks something.
    """
    if not isinstance(url, str):
        raise TypeError(f"`url` must be a string. {type(url)}: {url}")
    for name, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"`{name}` must be an integer. {type(value)}: {value}")
    scheme = urlsplit(url).scheme
    handler = _handlers.get(scheme)
    if handler is None:
        known = ", ".join(f"{name}://" for name in sorted(_handlers))
        raise RuntimeError(f"No rendezvous handler for {scheme}:// in {url!r}; there are {known}")
    return handler(_with_query(url, rank, world_size), **kwargs)


def _with_query(url: str, rank: int, world_size: int) -> str:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if rank != -1:
        query["rank"] = str(rank)
    if world_size != -1:
        query["world_size"] = str(world_size)
    address = urlunsplit(parts._replace(query=""))
    return f"{address}?{urlencode(query)}" if query else address
