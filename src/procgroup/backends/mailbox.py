"""Messages that a rank sends to itself, and the operations that stand for them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from procgroup.arrays.array_view import ArrayView
from procgroup.errors import CollectiveTimeout, DistError, PeerFailed


class Receive:
    """One receive from oneself, over when a message has come or an error has ended it."""

    def __init__(self, target: ArrayView, condition: threading.Condition) -> None:
        self.source = -1
        self.target = target
        self._condition = condition
        self._error: DistError | None = None
        self._over = False
        self._callbacks: list[Callable[[], None]] = []

    def wait(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while not self._over:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                # Waiting in slices keeps Ctrl-C working where an endless wait would not be interrupted.
                self._condition.wait(0.2 if left is None else min(left, 0.2))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over

    def exception(self) -> BaseException | None:
        return self._error

    def on_completion(self, callback: Callable[[], None]) -> None:
        with self._condition:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback()

    def finish(self, error: DistError | None = None) -> None:
        """End the receive. Call without holding the condition: callbacks run here."""
        with self._condition:
            if self._over:
                return
            self._error = error
            self.source = -1 if error else 0
            self._over = True
            self._condition.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Done:
    """An operation that was over before it was returned."""

    source = -1

    def wait(self, timeout: float | None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def on_completion(self, callback: Callable[[], None]) -> None:
        callback()


class Mailbox:
    """What was sent and not yet received, and the receives that still wait, by tag.

    ``describe`` returns what the errors say of a receive: op, sequence, group, rank and size.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]]) -> None:
        self._describe = describe
        self._condition = threading.Condition()
        self._sent: dict[int, deque[bytes]] = defaultdict(deque)
        self._waiting: dict[int, deque[Receive]] = defaultdict(deque)

    def send(self, source: ArrayView, tag: int) -> None:
        """Give a copy of an array to the first receive of its tag, or keep it for the next."""
        message = source.to_bytes()
        with self._condition:
            receive = self._waiting[tag].popleft() if self._waiting[tag] else None
            if receive is None:
                self._sent[tag].append(message)
        if receive is not None:
            self._deliver(message, receive)

    def post(self, target: ArrayView, tag: int) -> Receive:
        """Start a receive, which is over at once when a message is there."""
        with self._condition:
            receive = Receive(target, self._condition)
            message = self._sent[tag].popleft() if self._sent[tag] else None
            if message is None:
                self._waiting[tag].append(receive)
        if message is not None:
            self._deliver(message, receive)
        return receive

    def wait(self, receive: Receive, tag: int, limit: float) -> None:
        """Wait for a receive; raises CollectiveTimeout, after which no message reaches it any more."""
        try:
            if receive.wait(limit):
                return
        except KeyboardInterrupt:
            self._forget(receive, tag)
            raise
        self._forget(receive, tag)
        raise CollectiveTimeout(missing=[0], seconds=limit, **self._describe())

    def end(self, reason: str) -> None:
        """Make every waiting receive fail, and forget what was sent."""
        with self._condition:
            receives = [receive for waiting in self._waiting.values() for receive in waiting]
            self._waiting.clear()
            self._sent.clear()
        for receive in receives:
            receive.finish(PeerFailed(peer=0, reason=reason, **self._describe()))

    def _forget(self, receive: Receive, tag: int) -> None:
        with self._condition:
            if receive in self._waiting[tag]:
                self._waiting[tag].remove(receive)

    def _deliver(self, message: bytes, receive: Receive) -> None:
        if len(message) == receive.target.nbytes:
            receive.target.copy_from_bytes(message)
            receive.finish()
            return
        reason = f"it sent {len(message)} bytes into a receive of {receive.target.nbytes} bytes"
        receive.finish(PeerFailed(peer=0, reason=reason, **self._describe()))
