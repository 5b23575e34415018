"""Calls that are issued later than they are made, and keep their place among the calls of their group.

To *defer* a call is to leave it to a thread, which issues it once what it needs is there, as a tensor that is still
being copied from a device. Ranks match calls by the order in which each of them issues them. So what a group is asked
after a call was deferred waits until that one is issued; not until it is over::

    caller    defer(A)        all_reduce(B)  . . . . . . . . .  issues B
    thread             A: waits for its copy,  issues A  . . /

From its first deferred call on, a group's backend's place is taken by one that sees to this: so a group that defers
none pays nothing for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from procgroup.errors import DistBackendError
from procgroup.groups.backend import FLUSH_SECONDS, VERBS, Backend
from procgroup.groups.calls import GroupCalls
from procgroup.groups.coalescing import CoalescingBackend
from procgroup.groups.ended import EndedBackend

_IN_ORDER = frozenset((*VERBS, "broadcast_iovecs", "all_gather_iovecs", "make_subgroup"))
_IDLE_SECONDS = 10.0
_GRACE_SECONDS = 5.0

Issue = Callable[[], object]


class DeferringBackend:
    """A backend whose verbs wait until the calls that were deferred before are issued."""

    def __init__(self, backend: Backend, where: str) -> None:
        self.backend = backend
        self.is_aborted: bool = False
        self._where = where
        self._changed = threading.Condition()
        self._deferred: deque[Issue] = deque()
        self._deadline = 0.0
        self._thread: int | None = None
        self._is_running = False

    def defer(self, issue: Issue, seconds: float, *, at_once: bool = False) -> None:
        """Call ``issue`` in its place, from a thread; where nothing is deferred and ``at_once`` is true, from this one.

        It issues calls of this group, takes no longer than ``seconds`` before it does, and handles its own exceptions.
        """
        if at_once and not self._deferred:
            issue()
            return
        with self._changed:
            self._deferred.append(issue)
            self._deadline = max(self._deadline, time.monotonic() + seconds)
            self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, name="procgroup-deferred", daemon=True).start()

    def shutdown(self, reason: str = "", flush: float = FLUSH_SECONDS) -> None:
        """Issue what is deferred, then leave; without time for it, what is deferred fails."""
        if flush > 0:
            self._until_all_are_issued()
        else:
            self.is_aborted = True
        self.backend.shutdown(reason, flush)

    def abort(self) -> None:
        """Make every call fail at once: those that are deferred, too, which look at ``is_aborted``."""
        self.is_aborted = True
        self.backend.abort()

    def __getattr__(self, name: str) -> Any:
        if name in _IN_ORDER and self._deferred and not self._until_all_are_issued():
            raise DistBackendError(f"{name} on {self._where}: an earlier call was not issued by its deadline")
        return getattr(self.backend, name)

    def _until_all_are_issued(self) -> bool:
        """Wait for the thread; False when the deadline of what is deferred has passed. The thread itself does not."""
        if self._thread == threading.get_ident():
            return True
        with self._changed:
            limit = self._deadline + _GRACE_SECONDS - time.monotonic()
            return self._changed.wait_for(lambda: not self._deferred, max(limit, 0.0))

    def _work(self) -> None:
        self._thread = threading.get_ident()
        while self._waits_for_one():
            self._deferred[0]()
            with self._changed:
                self._deferred.popleft()
                self._changed.notify_all()

    def _waits_for_one(self) -> bool:
        """Wait for the next call; end the thread, and return False, where none comes for long."""
        with self._changed:
            self._is_running = self._changed.wait_for(lambda: len(self._deferred) > 0, _IDLE_SECONDS)
            if not self._is_running:
                self._thread = None
            return self._is_running


class DeferredCalls(GroupCalls):
    """Calls of a group that are issued later."""

    def deferring(self) -> DeferringBackend:
        """Return what defers calls of this group. Raises what any call raises where the group has ended."""
        backend: Any = self._backend
        if isinstance(backend, EndedBackend):
            backend.barrier()
        if isinstance(backend, CoalescingBackend):
            raise ValueError(f"a call on {self._where()} cannot be deferred while the group coalesces calls")
        if not isinstance(backend, DeferringBackend):
            backend = DeferringBackend(backend, self._where())
            self._backend = cast(Backend, backend)
        return cast(DeferringBackend, backend)
