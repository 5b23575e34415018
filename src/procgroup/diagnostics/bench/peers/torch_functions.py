"""The operations of the peers whose functions are those of torch.distributed: Gloo under PyTorch, and procgroup."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from procgroup.diagnostics.bench.rank_loop import Buffers, Call


def operations(
    dist: Any, reduce_scatter: Callable[..., Any], tensor_of: Callable[[Any], Any]
) -> dict[str, Callable[[Buffers], Call]]:
    """Return the operations by name; ``tensor_of`` makes of a NumPy array what ``dist`` takes.

    ``reduce_scatter`` is the function for one input array, whose name differs.
    """

    def array(buffers: Buffers) -> Any:
        return tensor_of(buffers.array)

    def rows(arrays: Any) -> Any:
        return list(tensor_of(arrays)) or None

    def ping_pong(buffers: Buffers) -> Call:
        tensor = array(buffers)

        def call() -> None:
            if buffers.rank == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            elif buffers.rank == 1:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)

        return call

    def window(buffers: Buffers) -> Call:
        tensor, received = array(buffers), rows(buffers.output) or []

        def call() -> None:
            works = [dist.irecv(row, buffers.partner) for row in received]
            works += [dist.isend(tensor, buffers.partner) for _ in received]
            for work in works:
                work.wait()

        return call

    return {
        "all_reduce": lambda buffers: partial(dist.all_reduce, array(buffers)),
        "broadcast": lambda buffers: partial(dist.broadcast, array(buffers), 0),
        "reduce": lambda buffers: partial(dist.reduce, array(buffers), 0),
        "all_gather": lambda buffers: partial(dist.all_gather, rows(buffers.output), array(buffers)),
        "gather": lambda buffers: partial(dist.gather, array(buffers), rows(buffers.output), 0),
        "scatter": lambda buffers: partial(dist.scatter, array(buffers), rows(buffers.blocks), 0),
        "reduce_scatter": lambda buffers: partial(
            reduce_scatter, array(buffers), tensor_of(buffers.blocks.reshape(-1))
        ),
        "all_to_all": lambda buffers: partial(
            dist.all_to_all_single, tensor_of(buffers.output), tensor_of(buffers.blocks)
        ),
        "barrier": lambda buffers: dist.barrier,
        "send_recv": ping_pong,
        "window": window,
    }
