"""What stands in a group's backend's place once the group cannot be used any more.

Putting it there keeps every check out of the path of a call: a live group has its backend, a
destroyed or forked one has something whose every verb raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

from procgroup.errors import DistError
from procgroup.groups.backend import Backend


class EndedBackend:
    """A backend whose every verb raises one error, made anew each time. ``shutdown`` and ``abort`` do nothing."""

    def __init__(self, former: Backend, error: type[DistError], argument: str, *, keep: bool = False) -> None:
        self.name: str = former.name
        self.transport: str = former.transport
        self.identity: int = former.identity
        self._error = error
        self._argument = argument
        # A forked child must not run the destructor of what its parent uses.
        self._kept = former if keep else None

    def _refuse(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        raise self._error(self._argument)

    broadcast = reduce = all_reduce = gather = all_gather = all_gather_single = scatter = _refuse
    reduce_scatter = reduce_scatter_single = all_to_all = all_to_all_single = barrier = send = recv = _refuse
    all_reduce_coalesced = broadcast_iovecs = all_gather_iovecs = check = make_subgroup = _refuse

    def reduce_in_rank_order(self) -> None: ...

    def shutdown(self, reason: str = "", flush: float = 0.0) -> None: ...

    def fail(self, reason: str, at_once: bool) -> None: ...

    def abort(self) -> None: ...
