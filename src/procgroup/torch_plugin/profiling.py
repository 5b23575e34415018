"""torch's profiler sees calls as torch's own backends show theirs: "procgroup:all_reduce", with the inputs' shapes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

_is_enabled = torch._C._autograd._profiler_enabled


def profiled(title: str, inputs: int = 0) -> Callable[[Any], Any]:
    """Let the profiler see calls of a method whose argument number ``inputs`` holds what it reads."""

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            if not _is_enabled():
                return method(self, *arguments, **named) if named else method(self, *arguments)
            shown = arguments[inputs] if len(arguments) > inputs else ()
            tensors = [shown] if isinstance(shown, torch.Tensor) else _flat(shown)
            record = torch.autograd._record_function_with_args_enter(f"{self.name()}:{title}", *tensors)
            try:
                return method(self, *arguments, **named)
            finally:
                _end(record)

        return call

    return decorate


def _end(record: Any) -> None:
    """End what is recorded on another thread. By that the profiler knows a call that it is to show as asynchronous."""
    ending = threading.Thread(target=torch.autograd._record_function_with_args_exit, args=(record,))
    ending.start()
    ending.join()


def _flat(tensors: Any) -> list[Any]:
    return [one for entry in tensors for one in ([entry] if isinstance(entry, torch.Tensor) else entry)]
