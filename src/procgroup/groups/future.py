"""Future: what a call will have brought about, as its caller sees it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any


class Future(concurrent.futures.Future[Any]):
    """A future with the methods of ``torch.futures.Future`` beside those of ``concurrent.futures.Future``."""

    def wait(self) -> Any:
        """Wait until the result is there and return it. Raises what made the call fail."""
        return self.result()

    def value(self) -> Any:
        """Return the result without waiting. Raises RuntimeError while there is none, and what made the call fail."""
        if not self.done():
            raise RuntimeError("The future has no value yet; call wait() or done() before value().")
        return self.result()

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a future of what ``callback`` returns; it is called with this future once that is completed."""
        following = Future()

        def follow(_completed: concurrent.futures.Future[Any]) -> None:
            try:
                following.set_result(callback(self))
            except BaseException as error:
                following.set_exception(error)

        self.add_done_callback(follow)
        return following
