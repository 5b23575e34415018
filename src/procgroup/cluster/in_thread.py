"""A call of another library that waits for other processes, in a thread of its own: it has no deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class InThread(threading.Thread):
    """Calls a function, from now on. The process may end before the function does."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # raised where it is waited for
            self._error = error

    def result(self) -> Any:
        """Return what the function has returned; raise what it has raised. Call it when the thread has ended."""
        if self._error is not None:
            raise self._error
        return self._result
