"""The states of a group in which its calls do not go directly to the engine.

Every call of a group enters the native group. While a group is in one of these states, the native group passes each
call to ``Issue``, which issues it when all states permit::

    call --> closed: raise --> coalescing: queue --> awaited: wait --> deferred: wait --> hooks --> engine

``closed`` is a group that was destroyed, or that a fork has copied. To *coalesce* is to queue calls, and to issue them
together later; the native group queues them itself, and passes on only those that cannot be coalesced. To *await* is to
wait, before each call, for calls that another library makes from a thread of its own: a function that JAX compiled may
still run after its call has returned, and make calls on the group then. Those calls themselves are not passed to
``Issue`` unless the group is in another state, too (``only_awaits``). To *defer* a call is to let a thread issue it
when its input is ready, as a tensor that is still being copied from a device; later calls wait until the deferred call
has been issued, not until it has completed. Ranks match calls by the order in which each rank issues them, so no state
may change that order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from procgroup.errors import DistBackendError, DistError

if TYPE_CHECKING:
    from procgroup import _native

_IDLE_SECONDS = 10.0
_GRACE_SECONDS = 5.0

Hook = Callable[[str, tuple[Any, ...]], Callable[[BaseException | None], object] | None]
"""Called before a call is issued, with the operation's name and arguments. The function that it returns, if any, is
called when the call has been issued (a blocking call: has completed), with the exception that it raised or None."""

_inside = threading.local()


QueuedCall = tuple[str, tuple[Any, ...], float]
"""One call: the operation's name, its arguments up to ``async_op``, and its timeout in seconds."""


class Issue:
    """Issues the calls of one group while it is in one of these states."""

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
        return self.await_others is not None or not self.only_awaits

    @property
    def only_awaits(self) -> bool:
        """Whether calls do no more than await others, so that those others themselves need not be passed to this."""
        return not self.hooks and all(state is None for state in (self.closed, self.queue, self.deferral))

    def __call__(self, op: str, *arguments: Any) -> Any:
        """Issue a call of the native group when all states permit, and return its result."""
        self.require_open()
        self.wait_for_turn(op)
        after = [then for hook in self.hooks if (then := hook(op, arguments)) is not None]
        error: BaseException | None = None
        try:
            return getattr(self._direct, op)(*arguments)
        except BaseException as raised:
            error = raised
            raise
        finally:
            for then in reversed(after):
                then(error)

    def close(self, error: Callable[[], DistError]) -> None:
        """Let every call raise ``error()``. Everything else is forgotten: a hook may refer to the group."""
        self.closed = error
        self.queue = self.await_others = self.deferral = None
        self.hooks = []

    def require_open(self) -> None:
        """Raise the error of a closed group, if the group is closed."""
        if self.closed is not None:
            raise self.closed()

    def wait_for_turn(self, op: str) -> None:
        """Wait until earlier calls have been issued. Raises DistBackendError after the deadline of a deferred one."""
        await_others, deferral = self.await_others, self.deferral
        if await_others is not None and not getattr(_inside, "is_true", False):
            await_others()
        if deferral is not None and not deferral.wait_until_issued():
            raise DistBackendError(f"{op} on {self._where}: an earlier call was not issued by its deadline")


@contextmanager
def inside_awaited_call() -> Iterator[None]:
    """Let calls of this thread skip the wait: they are the awaited calls themselves."""
    before = getattr(_inside, "is_true", False)
    _inside.is_true = True
    try:
        yield
    finally:
        _inside.is_true = before


class Deferral:
    """Issues deferred calls in order, from a thread."""

    def __init__(self) -> None:
        self.is_aborted: bool = False
        """Whether the group was aborted, or ends without waiting for deferred calls: they must then fail."""
        self._changed = threading.Condition()
        self._deferred: deque[Callable[[], object]] = deque()
        self._deadline = 0.0
        self._thread: int | None = None
        self._is_running = False

    def defer(self, issue: Callable[[], object], seconds: float, *, at_once: bool = False) -> None:
        """Call ``issue`` after all deferred calls, from a thread; with ``at_once``, from this one if there are none.

        ``issue`` issues calls of this group within ``seconds``, and handles its own exceptions.
        """
        if at_once and not self._deferred:
            issue()
            return
        from procgroup import _native  # loaded with the engine

        with self._changed:
            self._deferred.append(issue)
            _native.add_own_tasks(1)
            self._deadline = max(self._deadline, time.monotonic() + seconds)
            self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, name="procgroup-deferred", daemon=True).start()

    def wait_until_issued(self) -> bool:
        """Wait for all deferred calls; False after their deadline. In the deferring thread, do not wait."""
        if not self._deferred or self._thread == threading.get_ident():
            return True
        with self._changed:
            limit = self._deadline + _GRACE_SECONDS - time.monotonic()
            return self._changed.wait_for(lambda: not self._deferred, max(limit, 0.0))

    def _work(self) -> None:
        from procgroup import _native

        _native.add_own_thread()
        self._thread = threading.get_ident()
        while self._wait_for_next():
            self._deferred[0]()
            with self._changed:
                self._deferred.popleft()
                _native.add_own_tasks(-1)
                self._changed.notify_all()

    def _wait_for_next(self) -> bool:
        """Wait for the next deferred call; return False after _IDLE_SECONDS without one, which ends the thread."""
        with self._changed:
            self._is_running = self._changed.wait_for(lambda: len(self._deferred) > 0, _IDLE_SECONDS)
            if not self._is_running:
                self._thread = None
            return self._is_running


class QueuedWork:
    """What a call that is queued returns in place of a Work: whatever the caller does with it raises ValueError."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(f"a queued call's Work has no {name}")

        def refuse(*_arguments: Any) -> NoReturn:
            raise ValueError(
                f"Illegal to call {name} on IllegalWork object: the call is issued when the coalescing manager ends. "
                "Call wait() of the manager instead."
            )

        return refuse
