"""The parts of a backward that run outside of the reducer: hooks, the callback at its end, GPU streams, optimizers.

The end of a backward is a callback of autograd's engine. It belongs to the backward that registers it, which for a
checkpointed module may run inside another one. A hook on the module's outputs therefore registers it: these gradients
are computed before all others of the module. When a backward fails, autograd drops the callback without notice; only
weak references to the callback are kept, so that its disappearance shows. On GPUs a thread of autograd's drops it, just
after the backward has raised its error.

Autograd accumulates each gradient on the GPU stream on which the forward has used the parameter. Mostly that is one
stream. Where a forward uses several, a bucket's gradients arrive on different ones, and the stream on which they are
packed waits for the others.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from procgroup.parallel.pytorch import torch

_MAX_DEPTH = 20
_DROPPED_WITHIN = 5.0
"""Seconds to wait for autograd's thread to drop the callback of a failed backward."""


def find_tensors(output: Any) -> Iterator[Any]:
    """Yield the tensors of a module's output, each once.

    Searches lists, tuples, sets, mappings, dataclasses and the attributes of other objects.
    """
    seen: set[int] = set()
    stack = [(output, _MAX_DEPTH)]
    while stack:
        value, depth = stack.pop()
        if id(value) in seen:
            continue  # objects may refer to each other
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif depth:
            stack += [(entry, depth - 1) for entry in _entries(value)]


def _entries(value: Any) -> Iterable[Any]:
    if value is None or isinstance(value, (str, bytes, int, float, type, torch.nn.Module)):
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set)):
        return value
    return vars(value).values() if hasattr(value, "__dict__") else ()


def add_gradient_hook(parameter: Any, hook: Callable[[Any], None]) -> Any:
    """Call ``hook(parameter)`` after each accumulation into the gradient; return a handle that removes the hook.

    A frozen parameter gets the hook for later training.
    """
    is_frozen = not parameter.requires_grad
    parameter.requires_grad_()  # torch accepts no hook on a frozen parameter
    handle = parameter.register_post_accumulate_grad_hook(hook)
    if is_frozen:
        parameter.requires_grad_(False)
    return handle


class RunningBackward:
    """The backward that runs now: its callback at the end, and the streams on which its gradients arrive."""

    def __init__(self) -> None:
        self._callback: Callable[[], partial[None] | None] = _none
        self._is_dropped = threading.Event()
        self._cleanup: Callable[[], object] = _none
        self._streams: dict[Any, set[Any]] = {}

    def is_registered(self) -> bool:
        """Return whether the callback is registered and still to come; False after a failed backward."""
        return self._callback() is not None

    def await_dropped(self) -> None:
        """Wait until the callback is gone, between two backwards of this thread."""
        if self.is_registered():
            self._is_dropped.wait(_DROPPED_WITHIN)

    def register(self, call: Callable[[], None], cleanup: Callable[[], None] | None) -> None:
        """Begin a backward: call ``call`` at its end, and ``cleanup`` when it has ended, also after an error."""
        callback = partial(self._run, call)
        self._streams.clear()
        self._callback = weakref.ref(callback)
        self._is_dropped = threading.Event()
        weakref.finalize(callback, self._is_dropped.set).atexit = False
        if cleanup is not None:
            self._cleanup = finalizer = weakref.finalize(callback, cleanup)
            finalizer.atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _run(self, call: Callable[[], None]) -> None:
        self._callback = _none
        cleanup, self._cleanup = self._cleanup, _none
        try:
            call()
        finally:
            cleanup()  # before the backward returns, which on GPUs does not wait for the callback to go

    def see_stream(self, device: Any) -> None:
        """Note the current stream, on which a gradient has arrived."""
        self._streams.setdefault(device, set()).add(torch.cuda.current_stream(device))

    def join_streams(self, device: Any, gradients: Iterable[Any]) -> None:
        """Let the current stream wait for the others; keep the memory of gradients until it has read them."""
        current = torch.cuda.current_stream(device)
        others = self._streams.get(device, set()) - {current}
        for stream in others:
            current.wait_stream(stream)
        for gradient in gradients if others else ():
            if gradient is not None and not gradient.is_sparse:
                gradient.record_stream(current)


class BackwardOptimizers:
    """The optimizers of one wrapped model that step at the end of each backward whose gradients are averaged."""

    def __init__(self) -> None:
        self.created: list[Any] = []
        # The parameters with optimizers of torch that were taken over; None before that.
        self._taken_over: list[Any] | None = None

    def take_over(self, parameters: Iterable[Any]) -> None:
        """Take over, once, the optimizers that torch's ``_apply_optimizer_in_backward`` has set on parameters.

        Torch's own hooks would step before the gradients are averaged.
        """
        if self._taken_over is not None:
            return
        self._taken_over = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
        if self._taken_over:
            handles = torch.distributed.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map
            for handle in (each for parameter in self._taken_over for each in handles.get(parameter, ())):
                handle.remove()

    def step(self) -> None:
        """Step all optimizers; set the gradients of parameters that were taken over to None, as torch does."""
        for optimizer in self.created:
            optimizer.step()
        for parameter in self._taken_over or ():
            optimizers = getattr(parameter, "_in_backward_optimizers", ())  # a copied parameter has none
            if optimizers and parameter.grad is not None:
                for optimizer in optimizers:
                    optimizer.step()
                parameter.grad = None


def accumulates_gradients(parameters: Container[int]) -> bool:
    """Return, within a hook, whether the running backward accumulates into parameters (given by their ids).

    False in ``torch.autograd.grad``. True for a backward that does not reach the parameters but accumulates into other
    tensors: other ranks may use the parameters.
    """
    is_reached, others = False, []
    try:
        for leaf in _leaves(torch._C._current_autograd_node()):
            if id(leaf.variable) not in parameters:
                others.append(leaf)
            elif torch._C._will_engine_execute_node(leaf):
                return True
            else:
                is_reached = True
        return not is_reached and any(map(torch._C._will_engine_execute_node, others))
    except RuntimeError:  # raised in torch.autograd.grad, for the leaves that it is called with
        return False


def is_inside_backward() -> bool:
    """Return whether a backward is running in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def _leaves(root: Any) -> Iterator[Any]:
    """Yield the nodes of a graph that accumulate gradients, in depth-first order."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _none() -> None:
    return None
