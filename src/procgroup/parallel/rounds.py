"""When a backward begins and ends, as seen from hooks that autograd calls inside of it.

The end is a callback that autograd calls when the whole backward is over. It belongs to the backward in which it was
asked for, which for a checkpointed module may be one inside of another: so a module's outputs ask for it, whose
gradients come before everything inside of the module. When a backward fails, autograd drops the callback, and nothing
else tells: so only weak references are kept to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from procgroup.parallel.pytorch import torch


class _End:
    """Called once at the end of a backward."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


class BackwardEnd:
    """Asks for one call at the end of the backward that runs now."""

    def __init__(self) -> None:
        self._end: Callable[[], _End | None] = _nothing
        self._first: Any = None

    def is_awaited(self) -> bool:
        """Tell whether the call was asked for, is still to come, and the backward has not failed."""
        return self._end() is not None

    def ask(self, call: Callable[[], None]) -> None:
        """Have ``call`` called at the end of this backward."""
        end = _End(partial(self._run, call))
        self._end = weakref.ref(end)
        self._first = torch._C._current_autograd_node()
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _run(self, call: Callable[[], None]) -> None:
        self._end = _nothing
        try:
            call()
        finally:
            self._first = None

    def accumulates_gradients(self) -> bool:
        """Tell, at the end of a backward, whether it was for all leaves; False in torch.autograd.grad."""
        try:
            return all(map(torch._C._will_engine_execute_node, _leaves(self._first)))
        except RuntimeError:  # autograd refuses to answer in torch.autograd.grad, for the leaves that it is for
            return False


def is_inside_backward() -> bool:
    """Tell whether the caller is called by a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def _leaves(first: Any) -> Iterator[Any]:
    """Yield what accumulates gradients in a graph."""
    seen, waiting = {first}, [first]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node
        following = {node for node, _ in node.next_functions if node is not None} - seen
        seen |= following
        waiting += following


def _nothing() -> None:
    return None
