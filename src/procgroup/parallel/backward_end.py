"""When a backward begins and ends, as seen from hooks that autograd calls inside of it.

The end is a callback that autograd calls when the whole backward is over. It belongs to the backward in which it was
asked for, which for a checkpointed module may be one inside of another: so a module's outputs ask for it, whose
gradients come before everything inside of the module. When a backward fails, autograd drops the callback, and nothing
else tells: so only weak references are kept to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
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

    def is_awaited(self) -> bool:
        """Tell whether the call was asked for, is still to come, and the backward has not failed."""
        return self._end() is not None

    def ask(self, call: Callable[[], None]) -> None:
        """Have ``call`` called at the end of this backward."""
        end = _End(partial(self._run, call))
        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def clean_up(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when this backward is over, well or badly."""
        weakref.finalize(self._end(), call).atexit = False

    def _run(self, call: Callable[[], None]) -> None:
        self._end = _nothing
        call()

    def accumulates_gradients(self, parameters: Container[int]) -> bool:
        """Tell, in a hook, whether this backward adds to gradients of parameters, given by their ids.

        Not so in torch.autograd.grad. A backward that does not reach them counts, when it adds to any gradient: other
        ranks may use them.
        """
        mine, others = False, []
        try:
            for leaf in _leaves(torch._C._current_autograd_node()):
                if id(leaf.variable) not in parameters:
                    others.append(leaf)
                elif torch._C._will_engine_execute_node(leaf):
                    return True
                else:
                    mine = True
            return not mine and any(map(torch._C._will_engine_execute_node, others))
        except RuntimeError:  # autograd refuses to answer in torch.autograd.grad, for the leaves that it is for
            return False


def is_inside_backward() -> bool:
    """Tell whether the caller is called by a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def _leaves(first: Any) -> Iterator[Any]:
    """Yield what accumulates gradients in a graph, what is near first."""
    seen, waiting = {first}, [first]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _nothing() -> None:
    return None
