"""file:///path: the ranks meet in a file that all of them can reach. What a dead job left there is no obstacle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from procgroup import types
from procgroup.rendezvous import place
from procgroup.stores.store import Store
from procgroup.types import DEFAULT_TIMEOUT, Timeout


def file_rendezvous(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size). Raises ValueError when the URL lacks the path, the rank or the world size."""
    from procgroup.stores.file import FileStore

    parts = urlsplit(url)
    if parts.netloc or not parts.path.strip("/"):
        raise ValueError(
            "Error initializing procgroup using file:// rendezvous: path missing or not absolute "
            f"in {url!r}. Write file:///path/to/a/file, with three slashes."
        )
    rank, world_size = place.required(url)
    store = FileStore(unquote(parts.path), world_size)
    store.set_timeout(types.seconds(timeout))
    yield store, rank, world_size
