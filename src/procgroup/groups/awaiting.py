"""Calls that must not overtake others, which another library issues later from a thread of its own.

A function that JAX compiled may run on after the call of it has returned, and make calls on a group then. Ranks match
calls by the order in which each of them issues them; a call that a program makes meanwhile would come before them on
one rank and after them on another. So every call on such a group first awaits what is in progress there. From then on
a group's backend's place is taken by one that sees to this: a group that nobody else uses pays nothing for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from procgroup.groups.backend import VERBS, Backend
from procgroup.groups.calls import GroupCalls
from procgroup.groups.coalescing import CoalescingBackend
from procgroup.groups.deferring import DeferringBackend

_IN_ORDER = frozenset((*VERBS, "broadcast_iovecs", "all_gather_iovecs", "make_subgroup"))
_inside = threading.local()


class AwaitingBackend:
    """A backend whose verbs await first what is in progress elsewhere."""

    def __init__(self, backend: Backend, await_others: Callable[[], object]) -> None:
        self.backend = backend
        self.await_others = await_others

    def __getattr__(self, name: str) -> Any:
        if name in _IN_ORDER and not getattr(_inside, "is_true", False):
            self.await_others()
        return getattr(self.backend, name)


class AwaitingCalls(GroupCalls):
    """Calls of a group that await those that another library makes."""

    def await_before_calls(self, await_others: Callable[[], object]) -> None:
        """Call ``await_others`` before each call, except in ``inside_awaited_call``. Does nothing the second time."""
        place: Any = self._backend
        if isinstance(place, (CoalescingBackend, DeferringBackend)):  # which may end before the group does
            if not isinstance(place.backend, AwaitingBackend):
                place.backend = cast(Backend, AwaitingBackend(place.backend, await_others))
        elif not isinstance(place, AwaitingBackend):
            self._backend = cast(Backend, AwaitingBackend(place, await_others))

    def await_others(self) -> None:
        """Wait until all that ``await_before_calls`` speaks of is over, well or badly."""
        if isinstance(backend := cast(Any, self._backend), AwaitingBackend):
            with suppress(Exception):  # whoever started it is told
                backend.await_others()

    @contextmanager
    def inside_awaited_call(self) -> Iterator[None]:
        """Make calls of this thread at once: they are those that others await."""
        before = getattr(_inside, "is_true", False)
        _inside.is_true = True
        try:
            yield
        finally:
            _inside.is_true = before
