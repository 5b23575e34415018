"""procgroup as a peer: ``python -m procgroup run --nproc-per-node N procgroup_peer.py SOCKET``."""

from __future__ import annotations

import sys
from functools import partial

from rank_loop import Buffers, Call, Driver, serve

import procgroup as dist


def ping_pong(buffers: Buffers) -> Call:
    def call() -> None:
        if buffers.rank == 0:
            dist.send(buffers.array, 1)
            dist.recv(buffers.array, 1)
        elif buffers.rank == 1:
            dist.recv(buffers.array, 0)
            dist.send(buffers.array, 0)

    return call


OPERATIONS = {
    "all_reduce": lambda buffers: partial(dist.all_reduce, buffers.array),
    "broadcast": lambda buffers: partial(dist.broadcast, buffers.array, 0),
    "reduce": lambda buffers: partial(dist.reduce, buffers.array, 0),
    "all_gather": lambda buffers: partial(dist.all_gather, list(buffers.output), buffers.array),
    "barrier": lambda buffers: dist.barrier,
    "send_recv": ping_pong,
}

if __name__ == "__main__":
    driver = Driver(sys.argv[1])
    dist.init_process_group("gloo")
    serve(driver, dist.get_rank(), dist.get_world_size(), OPERATIONS, f"procgroup {dist.__version__}")
    dist.destroy_process_group()
