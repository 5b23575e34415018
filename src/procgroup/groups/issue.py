"""The states of a group in which its calls do not simply go to the engine.

Every call of a group enters the native group. While a group is in one of these states, it hands each call over to
``Issue``, which issues it when it may be issued::

    call --> closed: raise --> coalescing: queue --> awaited: wait --> deferred: wait --> hooks --> engine

``closed`` is a group that was destroyed, or that a fork has copied. To *coalesce* is to queue calls, and to issue them
together later. To *await* is to wait, before each call, for calls that another library makes from a thread of its own:
a function that JAX compiled may run on after the call of it has returned, and make calls on the group then. To *defer*
a call is to leave it to a thread, which issues it once what it needs is there, as a tensor that is still being copied
from a device; calls that are made meanwhile wait until that one is issued, not until it is over. Ranks match calls by
the order in which each of them issues them, so none of these may change it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from procgroup import _native
from procgroup.errors import DistBackendError, DistError

_IDLE_SECONDS = 10.0
_GRACE_SECONDS = 5.0

COALESCED = frozenset(("all_reduce", "all_gather_single", "reduce_scatter_single"))
"""The verbs whose calls a group that coalesces queues; all others are issued at once."""

Hook = Callable[[str, tuple[Any, ...]], Callable[[BaseException | None], object] | None]
"""Called before a call is issued, with the verb and its arguments. What it returns, if anything, is called when the
call has been issued (a blocking call: is over), with the exception that it raised, if any."""

_inside = threading.local()


class QueuedCall(NamedTuple):
    """One call of a verb, with its arguments up to ``async_op``."""

    verb: str
    arguments: tuple[Any, ...]
    timeout: float


class Issue:
    """Issues the calls of one group that is, or was, in one of these states."""

    def __init__(self, direct: _native.Group, where: str) -> None:
        self.closed: Callable[[], DistError] | None = None
        self.queue: list[QueuedCall] | None = None
        self.await_others: Callable[[], object] | None = None
        self.deferral: Deferral | None = None
        self.hooks: list[Hook] = []
        self._direct = direct
        self._where = where

    @property
    def is_needed(self) -> bool:
        """Whether the group is in one of the states."""
        states = (self.closed, self.queue, self.await_others, self.deferral)
        return any(state is not None for state in states) or bool(self.hooks)

    def __call__(self, verb: str, *arguments: Any) -> Any:
        """Issue a call of the native group when it may be issued, and return what that returns."""
        self.require_open()
        if self.queue is not None and verb in COALESCED:
            *given, async_op, timeout = arguments
            self.queue.append(QueuedCall(verb, tuple(given), timeout))
            return QueuedOperation() if async_op else None
        self.wait_for_turn(verb)
        after = [then for hook in self.hooks if (then := hook(verb, arguments)) is not None]
        error: BaseException | None = None
        try:
            return getattr(self._direct, verb)(*arguments)
        except BaseException as raised:
            error = raised
            raise
        finally:
            for then in reversed(after):
                then(error)

    def require_open(self) -> None:
        """Raise what every call of a closed group raises."""
        if self.closed is not None:
            raise self.closed()

    def wait_for_turn(self, verb: str) -> None:
        """Wait until what comes before a call has been issued. Raises DistBackendError when it is not, in its time."""
        if self.await_others is not None and not getattr(_inside, "is_true", False):
            self.await_others()
        if self.deferral is not None and not self.deferral.wait_until_issued():
            raise DistBackendError(f"{verb} on {self._where}: an earlier call was not issued by its deadline")


@contextmanager
def inside_awaited_call() -> Iterator[None]:
    """Make calls of this thread at once: they are those that others await."""
    before = getattr(_inside, "is_true", False)
    _inside.is_true = True
    try:
        yield
    finally:
        _inside.is_true = before


class Deferral:
    """Issues deferred calls in their order, from a thread."""

    def __init__(self) -> None:
        self.is_aborted: bool = False
        """Whether the group was aborted, or ends without time for what is deferred: then such calls are to fail."""
        self._changed = threading.Condition()
        self._deferred: deque[Callable[[], object]] = deque()
        self._deadline = 0.0
        self._thread: int | None = None
        self._is_running = False

    def defer(self, issue: Callable[[], object], seconds: float, *, at_once: bool = False) -> None:
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

    def wait_until_issued(self) -> bool:
        """Wait for the thread; False when the deadline of what is deferred has passed. The thread itself does not."""
        if not self._deferred or self._thread == threading.get_ident():
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


class QueuedOperation:
    """Stands for a call that is not issued yet: the manager's ``wait`` is the one to call."""

    source = -1

    def wait(self, timeout: float | None) -> bool:
        self._refuse("wait")

    def is_completed(self) -> bool:
        self._refuse("is_completed")

    def exception(self) -> BaseException | None:
        self._refuse("exception")

    def on_completion(self, callback: Callable[[], None]) -> None:
        self._refuse("get_future")

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(
            f"Illegal to call {name} on IllegalWork object: the call is issued when the coalescing manager ends. "
            "Call wait() of the manager instead."
        )
