"""tcp://host:port: rank 0 hosts the store at that address, the others connect to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from procgroup.cluster.addresses import parse_endpoint
from procgroup.rendezvous import hosting, place
from procgroup.stores.store import Store
from procgroup.types import DEFAULT_TIMEOUT, Timeout


def tcp_rendezvous(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size). Raises ValueError when the URL lacks host, port, rank or world size."""
    try:
        endpoint = parse_endpoint(urlsplit(url).netloc)
    except ValueError as error:
        raise ValueError(
            f"Error initializing procgroup using tcp:// rendezvous: {error}. Write tcp://host:port."
        ) from error
    rank, world_size = place.required(url)
    yield hosting.open_store(endpoint.host, endpoint.port, rank=rank, timeout=timeout), rank, world_size
