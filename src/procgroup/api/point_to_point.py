"""Messages between two ranks. ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` group ranks.

Messages between two ranks with one tag arrive in the order in which they were sent.
"""

from __future__ import annotations

from typing import cast

from procgroup.api.default import SLOT
from procgroup.api.membership import choose
from procgroup.api.roots import group_rank_of
from procgroup.groups.group import ProcessGroup
from procgroup.groups.work import Work
from procgroup.types import Array, Timeout


def send(
    tensor: Array,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Send an array; return when ``tensor`` may be changed again. Raises ValueError for a message to oneself."""
    chosen = SLOT.get().group if group is None else None  # the shortest way for small messages
    if chosen is None:
        chosen = choose(group, "send")
        if chosen is None:
            return
    destination = chosen.group_ranks.get(dst) if group_dst is None and dst.__class__ is int else None
    if destination is None:
        destination = group_rank_of(chosen, dst, group_dst)
    chosen.send(tensor, destination, tag, False, timeout)


def isend(
    tensor: Array,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work:
    """Start to send an array, which is not to be changed before the Work's ``wait`` returns.

    A rank that is not in the group is warned, and gets None.
    """
    chosen = SLOT.get().group if group is None else None
    if chosen is None:
        chosen = choose(group, "isend")
        if chosen is None:
            return cast(Work, None)
    destination = chosen.group_ranks.get(dst) if group_dst is None and dst.__class__ is int else None
    if destination is None:
        destination = group_rank_of(chosen, dst, group_dst)
    return chosen.send(tensor, destination, tag, True, timeout)


def recv(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> int:
    """Receive an array into ``tensor`` from one rank, or from any when none is named.

    Returns the sender's global rank; -1 when this rank is not in the group.
    """
    chosen = SLOT.get().group if group is None else None
    if chosen is None:
        chosen = choose(group, "recv")
        if chosen is None:
            return -1
    source = chosen.group_ranks.get(src) if group_src is None and src.__class__ is int else None
    if source is None:
        source = _source(chosen, src, group_src)
    return chosen.members[chosen.recv(tensor, source, tag, timeout)]


def irecv(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work:
    """Start to receive an array into ``tensor``, which is not to be used before the Work's ``wait`` returns.

    A rank that is not in the group is warned, and gets None.
    """
    chosen = SLOT.get().group if group is None else None
    if chosen is None:
        chosen = choose(group, "irecv")
        if chosen is None:
            return cast(Work, None)
    source = chosen.group_ranks.get(src) if group_src is None and src.__class__ is int else None
    if source is None:
        source = _source(chosen, src, group_src)
    return chosen.irecv(tensor, source, tag, timeout)


def _source(group: ProcessGroup, src: int | None, group_src: int | None) -> int | None:
    return None if src is None and group_src is None else group_rank_of(group, src, group_src)
