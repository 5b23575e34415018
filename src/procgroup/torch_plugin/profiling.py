"""torch's profiler sees calls as torch's own backends show theirs: "procgroup:all_reduce", with the inputs' shapes."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

is_profiling = torch._C._autograd._profiler_enabled
_ABSENT = object()


def profiled(title: str, inputs: int = 0) -> Callable[[Any], Any]:
    """Let the profiler see calls of a method whose argument number ``inputs`` holds what it reads."""

    def decorate(method: Any) -> Any:
        # The first three are named one by one: to hand on ``*arguments`` takes three times as long.
        @functools.wraps(method)
        def call(
            self: Any, first: Any = _ABSENT, second: Any = _ABSENT, third: Any = _ABSENT, *rest: Any, **named: Any
        ) -> Any:
            if not (rest or named or is_profiling()):
                if third is not _ABSENT:
                    return method(self, first, second, third)
                if second is not _ABSENT:
                    return method(self, first, second)
            arguments = [one for one in (first, second, third, *rest) if one is not _ABSENT]
            with recorded(f"{self.name()}:{title}", arguments[inputs : inputs + 1]):
                return method(self, *arguments, **named)

        return call

    return decorate


@contextlib.contextmanager
def recorded(title: str, shown: list[Any]) -> Iterator[None]:
    """Let the profiler see what is done inside, with these tensors; do nothing where there is no profiler."""
    if not is_profiling():
        yield
        return
    record = torch.autograd._record_function_with_args_enter(title, *_flat(shown))
    try:
        yield
    finally:
        # torch's profiler marks an event as asynchronous if it ends on another thread.
        ending = threading.Thread(target=torch.autograd._record_function_with_args_exit, args=(record,))
        ending.start()
        ending.join()


def _flat(tensors: Any) -> list[Any]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [one for entry in tensors for one in _flat(entry)]
