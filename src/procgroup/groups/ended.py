"""What stands in a group's backend's place once the group cannot be used any more.

Putting it there keeps every check out of the path of a call: a live group has its backend, a
destroyed or forked one has something whose every verb raises.
"""

from __future__ import annotations

from typing import Any

from procgroup.errors import DistError
from procgroup.groups.backend import VERBS, Backend

_OTHERS = ("broadcast_iovecs", "all_gather_iovecs", "check", "make_subgroup")


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

    def __getattr__(self, name: str) -> Any:
        if name in VERBS or name in _OTHERS:
            raise self._error(self._argument)
        raise AttributeError(name)

    def reduce_in_rank_order(self) -> None: ...

    def shutdown(self, reason: str = "", flush: float = 0.0) -> None: ...

    def fail(self, reason: str, at_once: bool) -> None: ...

    def abort(self) -> None: ...
