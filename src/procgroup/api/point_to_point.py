"""Messages between two ranks. ``src`` and ``dst`` are global ranks, ``group_src`` and ``group_dst`` group ranks.

Messages between two ranks with one tag arrive in the order in which they were sent. Messages of a batch with the same
peer and tag are matched in list order. The order of sends relative to receives does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from procgroup.api.default_group import Group, choose, is_foreign, resolve, slot
from procgroup.api.ranks import DESTINATION, group_rank_of
from procgroup.groups import checks
from procgroup.groups.group import ProcessGroup
from procgroup.types import Array, Timeout

if TYPE_CHECKING:
    from procgroup._native import Work


def send(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Send an array; return when ``tensor`` may be changed again. Raises ValueError for a message to oneself."""
    chosen = slot().group if group is None else None
    if chosen is None:
        chosen = choose(group, "send")
        if chosen is None:
            return
    # The ordinary call goes into native code from here: a small message takes less time than one or two more functions.
    ordinary = group_dst is None and timeout is None
    if not ordinary or chosen.calls.try_send(tensor, dst, tag, False) is NotImplemented:
        chosen.send(tensor, group_rank_of(chosen, dst, group_dst, DESTINATION), tag, False, timeout)


def isend(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work:
    """Start to send an array, which is not to be changed before the Work's ``wait`` returns.

    A rank that is not in the group is warned, and gets None.
    """
    chosen = slot().group if group is None else None
    if chosen is None:
        chosen = choose(group, "isend")
        if chosen is None:
            return cast("Work", None)
    if group_dst is None and timeout is None:
        work: Work = chosen.calls.try_send(tensor, dst, tag, True)
        if work is not NotImplemented:
            return work
    return chosen.send(tensor, group_rank_of(chosen, dst, group_dst, DESTINATION), tag, True, timeout)


def recv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> int:
    """Receive an array into ``tensor`` from one rank, or from any when none is named.

    Returns the sender's global rank; -1 when this rank is not in the group.
    """
    chosen = slot().group if group is None else None
    if chosen is None:
        chosen = choose(group, "recv")
        if chosen is None:
            return -1
    if group_src is None and timeout is None:
        source: int = chosen.calls.try_recv(tensor, src, tag, False)
        if source is not NotImplemented:
            return chosen.members[source]
    return chosen.members[chosen.recv(tensor, _source(chosen, src, group_src), tag, timeout)]


def irecv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work:
    """Start to receive an array into ``tensor``, which is not to be used before the Work's ``wait`` returns.

    A rank that is not in the group is warned, and gets None.
    """
    chosen = slot().group if group is None else None
    if chosen is None:
        chosen = choose(group, "irecv")
        if chosen is None:
            return cast("Work", None)
    if group_src is None and timeout is None:
        work: Work = chosen.calls.try_recv(tensor, src, tag, True)
        if work is not NotImplemented:
            return work
    return chosen.irecv(tensor, _source(chosen, src, group_src), tag, timeout)


class P2POp:
    """One message of a batch: ``isend`` or ``irecv``, an array, and the other rank.

    ``peer`` is a global rank, ``group_peer`` a rank of the group; exactly one is given. Raises ValueError for
    another ``op``, for a group that this rank is not in and for a rank that is not in the group, and TypeError
    for what is not an array.
    """

    def __init__(
        self,
        op: Callable[..., Work],
        tensor: Array,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError(
                f"Invalid ``op``. Expected ``op`` to be of type ``procgroup.isend`` or ``procgroup.irecv``, got {op!r}."
            )
        _check_array(tensor)
        if is_foreign(group):
            raise ValueError(
                "Invalid ``group``: this rank is not in it (NON_GROUP_MEMBER). "
                "Build the P2POp on the group's members only."
            )
        self.op: Callable[..., Work] = op
        self.tensor: Array = tensor
        self.group: ProcessGroup = resolve(group)
        self.group_peer: int = checks.group_rank(
            group_rank_of(self.group, peer, group_peer, ("peer", "group_peer")),
            self.group.size(),
            self.group.group_name,
        )
        self.peer: int = self.group.global_rank(self.group_peer)
        self.tag: int = checks.tag(tag)

    def __repr__(self) -> str:
        mine, other = self.group.rank(), self.group_peer
        source, destination = (mine, other) if self.op is isend else (other, mine)
        return (
            f"P2POp({self.op.__name__} pg={self.group.group_name}, group_src={source}, group_dst={destination}, "
            f"{getattr(self.tensor, 'shape', None)}, {getattr(self.tensor, 'dtype', None)})"
        )


def batch_isend_irecv(p2p_op_list: list[P2POp], timeout: Timeout | None = None) -> list[Work]:
    """Start all messages of the list; return one Work for each, in the order of the list.

    ``timeout``, a timedelta or seconds, is that of each message; None: see procgroup.timeout.
    Raises ValueError for anything but a list of P2POp of one group, IndexError for an empty list, and what ``isend``
    and ``irecv`` raise. All are checked before the first is started.
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(one, P2POp) for one in p2p_op_list):
        raise ValueError(
            "Invalid ``p2p_op_list``. Each op is expected to be of type ``procgroup.P2POp``, "
            f"in a list; got {_describe(p2p_op_list)}."
        )
    if not p2p_op_list:
        raise IndexError("Invalid ``p2p_op_list``: expected at least one P2POp, got an empty list.")
    group = p2p_op_list[0].group
    if any(one.group is not group for one in p2p_op_list):
        raise ValueError("All ops need to use the same group. Make one batch for each group.")
    for one in p2p_op_list if len(p2p_op_list) > 1 else ():
        group.check_message("recv" if one.op is irecv else "send", one.tensor, one.group_peer, one.tag)
    works: dict[int, Work] = {}
    # Receives first: what the peers send at the same time then goes straight into the arrays.
    for number in sorted(range(len(p2p_op_list)), key=lambda number: p2p_op_list[number].op is isend):
        works[number] = _start(p2p_op_list[number], timeout)
    return [works[number] for number in range(len(p2p_op_list))]


def _start(one: P2POp, timeout: Timeout | None) -> Work:
    if one.op is irecv:
        return one.group.irecv(one.tensor, one.group_peer, one.tag, timeout)
    return one.group.send(one.tensor, one.group_peer, one.tag, True, timeout)


def _check_array(tensor: Any) -> None:
    """Refuse what no backend takes for an array, so that it is found before any message of the batch is sent."""
    if hasattr(tensor, "__dlpack__") or hasattr(tensor, "__cuda_array_interface__"):
        return
    try:
        memoryview(tensor).release()
    except TypeError as error:
        raise TypeError(
            f"Invalid function argument. Expected parameter `tensor` to be an array but got {type(tensor)} instead."
        ) from error


def _describe(given: Any) -> str:
    if not isinstance(given, list):
        return f"a {type(given).__name__}"
    return "a list with " + next(type(one).__name__ for one in given if not isinstance(one, P2POp))


def _source(group: ProcessGroup, src: int | None, group_src: int | None) -> int | None:
    return None if src is None and group_src is None else group_rank_of(group, src, group_src)
