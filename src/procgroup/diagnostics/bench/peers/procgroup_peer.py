"""procgroup as a peer: ``procgroup run -n N -m ...bench.peers.procgroup_peer SOCKET [--symmetric]``.

With ``--symmetric`` all arrays lie in shared memory, from ``procgroup.empty``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import procgroup as dist
from procgroup.diagnostics.bench.rank_loop import DTYPE, Buffers, Call, Driver, ordinary, serve


def ping_pong(buffers: Buffers) -> Call:
    def call() -> None:
        if buffers.rank == 0:
            dist.send(buffers.array, 1)
            dist.recv(buffers.array, 1)
        elif buffers.rank == 1:
            dist.recv(buffers.array, 0)
            dist.send(buffers.array, 0)

    return call


def window(buffers: Buffers) -> Call:
    rows = list(buffers.output)

    def call() -> None:
        works = [dist.irecv(row, buffers.partner) for row in rows]
        works += [dist.isend(buffers.array, buffers.partner) for _ in rows]
        for work in works:
            work.wait()

    return call


def symmetric(shape: tuple[int, ...]) -> Any:
    return dist.empty(shape, dtype=DTYPE)


OPERATIONS: dict[str, Callable[[Buffers], Call]] = {
    "all_reduce": lambda buffers: partial(dist.all_reduce, buffers.array),
    "broadcast": lambda buffers: partial(dist.broadcast, buffers.array, 0),
    "reduce": lambda buffers: partial(dist.reduce, buffers.array, 0),
    "all_gather": lambda buffers: partial(dist.all_gather, list(buffers.output), buffers.array),
    "gather": lambda buffers: partial(dist.gather, buffers.array, list(buffers.output) or None, 0),
    "scatter": lambda buffers: partial(dist.scatter, buffers.array, list(buffers.blocks) or None, 0),
    "reduce_scatter": lambda buffers: partial(dist.reduce_scatter_single, buffers.array, buffers.blocks.reshape(-1)),
    "all_to_all": lambda buffers: partial(dist.all_to_all_single, buffers.output, buffers.blocks),
    "barrier": lambda buffers: dist.barrier,
    "send_recv": ping_pong,
    "window": window,
}

if __name__ == "__main__":
    driver = Driver(sys.argv[1])
    dist.init_process_group("gloo")
    allocate = symmetric if "--symmetric" in sys.argv else ordinary
    serve(driver, dist.get_rank(), dist.get_world_size(), OPERATIONS, f"procgroup {dist.__version__}", allocate)
    dist.destroy_process_group()
