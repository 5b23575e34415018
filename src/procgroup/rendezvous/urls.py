"""tcp://host:port and file:///path, and the rank and the world size in the query of any URL.

tcp: rank 0 hosts the store at that address, the others connect to it. file: the ranks meet in a file that all of them
can reach; what a dead job left there is no obstacle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from procgroup import types
from procgroup.cluster.addresses import parse_endpoint
from procgroup.rendezvous import hosting
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
    rank, world_size = required(url)
    yield hosting.open_store(endpoint.host, endpoint.port, rank=rank, timeout=timeout), rank, world_size


def file_rendezvous(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size). Raises ValueError when the URL lacks the path, the rank or the world size."""
    from procgroup.stores.file import FileStore

    parts = urlsplit(url)
    if parts.netloc or not parts.path.strip("/"):
        raise ValueError(
            "Error initializing procgroup using file:// rendezvous: path missing or not absolute "
            f"in {url!r}. Write file:///path/to/a/file, with three slashes."
        )
    rank, world_size = required(url)
    store = FileStore(unquote(parts.path), world_size)
    store.set_timeout(types.seconds(timeout))
    yield store, rank, world_size


def from_query(url: str) -> tuple[int | None, int | None]:
    """Return (rank, world size) of a URL's query; None where it says nothing. Raises ValueError for no number."""
    query = dict(parse_qsl(urlsplit(url).query))
    numbers: list[int | None] = []
    for name in ("rank", "world_size"):
        try:
            numbers.append(int(query[name]) if name in query else None)
        except ValueError:
            raise ValueError(f"expected {name} in {url!r} to be an integer, got {query[name]!r}") from None
    return numbers[0], numbers[1]


def required(url: str) -> tuple[int, int]:
    """Return (rank, world size) of a URL's query. Raises ValueError naming the one that is missing or out of range."""
    rank, world_size = from_query(url)
    scheme = urlsplit(url).scheme
    for name, value in (("rank", rank), ("world size", world_size)):
        if value is None:
            keyword = name.replace(" ", "_")
            raise ValueError(
                f"Error initializing procgroup using {scheme}:// rendezvous: {name} parameter missing. "
                f"Pass {keyword}=... to init_process_group, or add {keyword}=... to the URL's query."
            )
    assert rank is not None
    assert world_size is not None
    check(rank, world_size)
    return rank, world_size


def check(rank: int, world_size: int) -> None:
    """Raise ValueError unless 0 <= rank < world size."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be between 0 and {world_size - 1} in a world of {world_size}, got {rank}")
