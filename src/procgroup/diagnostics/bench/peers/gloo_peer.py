"""torch.distributed's Gloo as a peer: ``python -m procgroup.diagnostics.bench.peers.gloo_peer SOCKET RANKS``.

It starts its ranks itself, unless RANK and WORLD_SIZE say that somebody else does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from procgroup.diagnostics.bench.rank_loop import Buffers, Call, Driver, serve

if TYPE_CHECKING:
    import torch


def tensor_of(buffers: Buffers) -> torch.Tensor:
    import torch

    return torch.from_numpy(buffers.array)


def ping_pong(buffers: Buffers) -> Call:
    import torch.distributed as dist

    tensor = tensor_of(buffers)

    def call() -> None:
        if buffers.rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif buffers.rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    return call


def window(buffers: Buffers) -> Call:
    import torch
    import torch.distributed as dist

    tensor = tensor_of(buffers)
    rows = list(torch.from_numpy(buffers.output))

    def call() -> None:
        works = [dist.irecv(row, buffers.partner) for row in rows]
        works += [dist.isend(tensor, buffers.partner) for _ in rows]
        for work in works:
            work.wait()

    return call


def run_rank(socket_path: str, rank: int, ranks: int) -> None:
    driver = Driver(socket_path)
    import torch
    import torch.distributed as dist

    operations: dict[str, Callable[[Buffers], Call]] = {
        "all_reduce": lambda buffers: partial(dist.all_reduce, tensor_of(buffers)),
        "broadcast": lambda buffers: partial(dist.broadcast, tensor_of(buffers), 0),
        "reduce": lambda buffers: partial(dist.reduce, tensor_of(buffers), 0),
        "all_gather": lambda buffers: partial(
            dist.all_gather, list(torch.from_numpy(buffers.output)), tensor_of(buffers)
        ),
        "gather": lambda buffers: partial(
            dist.gather, tensor_of(buffers), list(torch.from_numpy(buffers.output)) or None, 0
        ),
        "scatter": lambda buffers: partial(
            dist.scatter, tensor_of(buffers), list(torch.from_numpy(buffers.blocks)) or None, 0
        ),
        "reduce_scatter": lambda buffers: partial(
            dist.reduce_scatter_tensor, tensor_of(buffers), torch.from_numpy(buffers.blocks).view(-1)
        ),
        "all_to_all": lambda buffers: partial(
            dist.all_to_all_single, torch.from_numpy(buffers.output), torch.from_numpy(buffers.blocks)
        ),
        "barrier": lambda buffers: dist.barrier,
        "send_recv": ping_pong,
        "window": window,
    }
    dist.init_process_group("gloo", init_method=f"file://{socket_path}.rendezvous", rank=rank, world_size=ranks)
    serve(driver, rank, ranks, operations, f"torch {torch.__version__}")
    dist.destroy_process_group()


def start_ranks(socket_path: str, ranks: int) -> int:
    """Fork the ranks before torch is loaded, and return the worst of their exit statuses."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            run_rank(socket_path, rank, ranks)
            return 0
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        sys.exit()
    sys.exit(start_ranks(sys.argv[1], int(sys.argv[2])))
