"""A process's place in its world, its rank and the world size, as the query of a URL tells it."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit


def from_query(url: str) -> tuple[int | None, int | None]:
    """Return (rank, world size) of a URL's query; None where it says nothing. Raises ValueError for no number."""
    query = dict(parse_qsl(urlsplit(url).query))
    return _number(url, query, "rank"), _number(url, query, "world_size")


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


def _number(url: str, query: dict[str, str], name: str) -> int | None:
    if name not in query:
        return None
    try:
        return int(query[name])
    except ValueError:
        raise ValueError(f"expected {name} in {url!r} to be an integer, got {query[name]!r}") from None
