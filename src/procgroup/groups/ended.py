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

    supports: frozenset[str] = frozenset()

    def __init__(self, former: Backend, error: type[DistError], argument: str, *, keep: bool = False) -> None:
        self.name = former.name
        self.transport = former.transport
        self._error = error
        self._argument = argument
        # A forked child must not run the destructor of what its parent uses.
        self._kept = former if keep else None

    def _refuse(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        raise self._error(self._argument)

    all_reduce = reduce = broadcast = all_gather = barrier = send = recv = _refuse

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...
