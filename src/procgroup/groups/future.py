"""Future: the result of an asynchronous call, for callbacks and for code that waits on futures."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from typing import Any

from procgroup.errors import ForkedProcessError


class Future(concurrent.futures.Future[Any]):
    """A future with the methods of ``torch.futures.Future`` beside those of ``concurrent.futures.Future``.

    In a forked child no thread completes the future, so waiting for it there raises ForkedProcessError.
    """

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it. Raises the call's error, or TimeoutError after ``timeout`` seconds."""
        self._require_own_process()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call; return its error, or None. Raises TimeoutError after ``timeout`` seconds."""
        self._require_own_process()
        return super().exception(timeout)

    def wait(self) -> Any:
        """Wait for the result and return it. Raises the call's error."""
        return self.result()

    def value(self) -> Any:
        """Return the result without waiting. Raises RuntimeError while there is none, and the call's error."""
        if not self.done():
            raise RuntimeError("The future has no value yet; call wait() or done() before value().")
        return self.result()

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a future of the result of ``callback``, which is called with this future when it has completed."""
        following = Future()

        def follow(_completed: concurrent.futures.Future[Any]) -> None:
            try:
                following.set_result(callback(self))
            except BaseException as error:
                following.set_exception(error)

        self.add_done_callback(follow)
        return following

    def _require_own_process(self) -> None:
        if self._process != os.getpid() and not self.done():
            raise ForkedProcessError("a future of a call")
