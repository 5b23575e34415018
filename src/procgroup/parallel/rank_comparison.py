"""Compare values over the ranks of a group, such as settings and descriptions of models, before training starts."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from procgroup.errors import CollectiveMismatch
from procgroup.groups import objects
from procgroup.groups.group import ProcessGroup

_DIGEST_BYTES = 16


def gather(group: ProcessGroup, value: Any) -> list[Any]:
    """Return the values of all ranks: numbers, strings, and containers of these."""
    return objects.all_gather(group, value, group.seconds_of(None), safe=True)


def gather_if_different(group: ProcessGroup, value: Any) -> list[Any] | None:
    """Compare hashes of a value over the ranks; return all values when they differ, None when they are equal."""
    digest = blake2b(repr(value).encode(), digest_size=_DIGEST_BYTES).digest()
    digests = bytearray(_DIGEST_BYTES * group.size())
    group.all_gather_single(digests, bytearray(digest))
    return None if digests == digest * group.size() else gather(group, value)


def require_same(group: ProcessGroup, op: str, value: str, *, differing: str, advice: str) -> None:
    """Raise CollectiveMismatch on every rank when a value differs between ranks; ``differing`` names the values."""
    values = gather_if_different(group, value)
    if values is not None:
        raise mismatch(group, op, dict(enumerate(values)), differing=differing, advice=advice)


def mismatch(
    group: ProcessGroup, op: str, held: Mapping[int, str], *, differing: str, advice: str, sequence: int = 0
) -> CollectiveMismatch:
    """Return the error for the different things that the ranks have, given by group rank."""
    return CollectiveMismatch(
        calls=held,
        differing=differing,
        advice=advice,
        op=op,
        sequence=sequence,
        group=group.group_name,
        rank=group.rank(),
        size=group.size(),
        members=group.members,
    )
