"""Calls that move Python objects. They pickle; arrays inside of objects travel as raw memory.

``src`` and ``dst`` are global ranks; ``group_src`` and ``group_dst`` are group ranks. The root of a collective is by
default global rank 0. A send needs a rank; a receive without one accepts any sender. ``device`` has no effect.
Unpickling runs code that the sender chooses: with ``safe=True`` a rank takes plain data (numbers, strings, lists,
dicts, sets, dates) and arrays only, and refuses everything else. It reads slower: some 0.5 us per number or string;
arrays move as fast.

On every call: TypeError and its like for an object that cannot be pickled, on its own rank, and PicklingFailed on
the others; UnpicklingFailed, which names the sender and the type, where an object cannot be unpickled. After
these the group can still be used. ``timeout`` is a timedelta or seconds for all of the call; None: see
procgroup.timeout.
"""

from __future__ import annotations

from typing import Any

from procgroup.api.default_group import Group, choose
from procgroup.api.ranks import DESTINATION, SOURCE, group_rank_of, root_or_first
from procgroup.groups import checks, objects
from procgroup.groups.group import ProcessGroup
from procgroup.types import Timeout


def all_gather_object(
    object_list: list[Any], obj: Any, group: Group = None, timeout: Timeout | None = None, safe: bool = False
) -> None:
    """Put the object of each group rank ``r`` into ``object_list[r]`` on every rank.

    Raises ValueError when the list is shorter than the group.
    """
    chosen = choose(group, "all_gather_object")
    if chosen is None:
        return
    _check_list(object_list, "object_list", chosen.size())
    object_list[: chosen.size()] = objects.all_gather(chosen, obj, timeout, safe)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
    safe: bool = False,
) -> None:
    """Replace the objects in every rank's list by those of ``src``.

    Raises CollectiveMismatch on every rank when the lists differ in length.
    """
    chosen = choose(group, "broadcast_object_list")
    if chosen is None:
        return
    _check_list(object_list, "object_list")
    root = _member(chosen, root_or_first(chosen, src, group_src))
    object_list[:] = objects.broadcast(chosen, object_list, root, timeout, safe)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
    safe: bool = False,
) -> None:
    """Put the object of each group rank ``r`` into ``object_gather_list[r]`` on ``dst``.

    Raises ValueError when the list is missing or too short on ``dst``, or given elsewhere.
    """
    chosen = choose(group, "gather_object")
    if chosen is None:
        return
    root = _member(chosen, root_or_first(chosen, dst, group_dst, DESTINATION))
    if chosen.rank() == root:
        if object_gather_list is None:
            raise ValueError(
                f"Argument ``object_gather_list`` must be specified on destination rank {root}: "
                f"pass a list of {chosen.size()} places."
            )
        _check_list(object_gather_list, "object_gather_list", chosen.size())
    elif object_gather_list:
        raise ValueError(
            "Argument ``object_gather_list`` must NOT be specified on non-destination ranks; "
            f"the destination is group rank {root}: pass None here."
        )
    gathered = objects.gather(chosen, obj, root, timeout, safe)
    if gathered is not None and object_gather_list is not None:
        object_gather_list[: chosen.size()] = gathered


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
    safe: bool = False,
) -> None:
    """Put object ``r`` of ``src``'s input list into ``scatter_object_output_list[0]`` of each group rank ``r``.

    Raises ValueError for an output list of length 0, and for an input list of ``src`` that has not one object per rank.
    """
    chosen = choose(group, "scatter_object_list")
    if chosen is None:
        return
    root = _member(chosen, root_or_first(chosen, src, group_src))
    if not isinstance(scatter_object_output_list, list) or len(scatter_object_output_list) < 1:
        raise ValueError(
            "Expected argument scatter_object_output_list to be a list of size at least 1. "
            f"Got {scatter_object_output_list!r}."
        )
    if chosen.rank() == root:
        if scatter_object_input_list is None:
            raise ValueError(
                f"source rank must provide non-None scatter_object_input_list, got None on group rank {root}: "
                f"pass a list of {chosen.size()} objects"
            )
        if len(scatter_object_input_list) != chosen.size():
            raise ValueError(
                f"Expected argument scatter_object_input_list to have {chosen.size()} objects, one per rank, "
                f"got {len(scatter_object_input_list)}."
            )
    scatter_object_output_list[0] = objects.scatter(chosen, scatter_object_input_list, root, timeout, safe)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    timeout: Timeout | None = None,
) -> None:
    """Send objects to one rank. Raises ValueError for oneself. ``use_batch`` has no effect."""
    chosen = choose(group, "send_object_list")
    if chosen is None:
        return
    if group_dst is None and timeout is None and objects.try_send(chosen, object_list, dst):
        return
    _check_list(object_list, "object_list")
    destination = _other(chosen, dst, group_dst, "destination")
    objects.send(chosen, object_list, destination, timeout)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    timeout: Timeout | None = None,
    safe: bool = False,
) -> int:
    """Receive as many objects as the list has places, from one rank, or from any when none is named.

    Returns the sender's global rank; -1 when this rank is not in the group. Raises ValueError for oneself,
    CollectiveMismatch when another number of objects was sent.
    """
    chosen = choose(group, "recv_object_list")
    if chosen is None:
        return -1
    _check_list(object_list, "object_list")
    source = None
    if src is not None or group_src is not None:
        source = _other(chosen, src, group_src, "source")
    received, sender = objects.recv(chosen, len(object_list), source, timeout, safe)
    object_list[:] = received
    return chosen.members[sender]


def _member(group: ProcessGroup, rank: int) -> int:
    if rank.__class__ is int and 0 <= rank < group.size():
        return rank
    return checks.group_rank(rank, group.size(), group.group_name)


def _check_list(value: Any, name: str, length: int = 0) -> None:
    if value.__class__ is list and len(value) >= length:
        return
    if not isinstance(value, list):
        raise TypeError(f"Expected parameter `{name}` to be a list, got {type(value).__name__}.")
    if len(value) < length:
        raise ValueError(f"Expected parameter `{name}` to have {length} places, one per rank, got {len(value)}.")


def _other(group: ProcessGroup, global_rank: int | None, group_rank: int | None, role: str) -> int:
    """Return the group rank of another rank. Raises ValueError for this one."""
    names = SOURCE if role == "source" else DESTINATION
    rank = group_rank_of(group, global_rank, group_rank, names)
    if group_rank is not None:
        rank = _member(group, rank)
    if rank == group.rank():
        raise ValueError(
            f"Invalid {role} rank: {role} rank should not be the same as the rank of the current process. "
            "Use copy.deepcopy instead of a message to oneself."
        )
    return rank
