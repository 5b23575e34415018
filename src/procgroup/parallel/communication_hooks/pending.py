"""What a hook returns: something to wait for, and what is left to do then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from procgroup.parallel.grad_bucket import Waitable


class Pending:
    """A bucket on its way: ``wait`` waits and returns what ``finish`` makes of the result.

    DistributedDataParallel waits bucket by bucket, at the end of the backward: so ``finish`` may make calls, which come
    in the same order on every rank.
    """

    def __init__(self, waited_for: Waitable, finish: Callable[[Any], Any]) -> None:
        self._waited_for = waited_for
        self._finish = finish

    def wait(self) -> Any:
        """Return the averaged bucket."""
        return self._finish(self._waited_for.wait())


class Done:
    """A bucket for which nothing has to be waited for."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        """Return the result."""
        return self._result
