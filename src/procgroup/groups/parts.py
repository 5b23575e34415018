"""The calls that send an array of bytes which lies in parts, as methods of a group.

Many small buffers move in one call, straight from where they lie. Only this rank's side is special: the others make
the ordinary calls, and receive into one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from procgroup.groups.calls import GroupCalls


class Parts(NamedTuple):
    """An array of ``nbytes`` bytes: ``buffers[i]`` at ``offsets[i]``, in order, and anything in between."""

    buffers: Sequence[memoryview]
    offsets: Sequence[int]
    nbytes: int


class CallsOfParts(GroupCalls):
    """Blocking calls of uint8 arrays. ``timeout`` is in seconds."""

    @property
    def takes_parts(self) -> bool:
        """Whether the backend has these calls; the same on all ranks."""
        return hasattr(self._backend, "broadcast_iovecs")

    def broadcast_iovecs(self, parts: Parts, timeout: float) -> None:
        """Copy what the parts make up into every other rank's array."""
        cast(Any, self._backend).broadcast_iovecs(*parts, timeout)

    def all_gather_iovecs(self, outputs: Sequence[Any], parts: Parts, timeout: float) -> None:
        """Copy the array of each rank ``r``, this one's from its parts, into ``outputs[r]`` on every rank."""
        cast(Any, self._backend).all_gather_iovecs(outputs, *parts, timeout)
