"""An MPI library under mpi4py as a peer: ``mpiexec -n N python -m ...bench.peers.mpi_peer SOCKET``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from procgroup.diagnostics.bench.rank_loop import BenchArrays, Call, Driver, serve

driver = Driver(sys.argv[1])

from mpi4py import MPI  # noqa: E402  (importing it is MPI_Init, which can get stuck: the driver comes first)

world = MPI.COMM_WORLD


def reduce(buffers: BenchArrays) -> Call:
    if buffers.rank == 0:
        return partial(world.Reduce, MPI.IN_PLACE, buffers.array)
    return partial(world.Reduce, buffers.array, None)


def rows_or_none(rows: Any) -> Any:
    return rows if len(rows) else None


def ping_pong(buffers: BenchArrays) -> Call:
    def call() -> None:
        if buffers.rank == 0:
            world.Send(buffers.array, 1)
            world.Recv(buffers.array, 1)
        elif buffers.rank == 1:
            world.Recv(buffers.array, 0)
            world.Send(buffers.array, 0)

    return call


def window(buffers: BenchArrays) -> Call:
    rows = list(buffers.output)

    def call() -> None:
        requests = [world.Irecv(row, buffers.partner) for row in rows]
        requests += [world.Isend(buffers.array, buffers.partner) for _ in rows]
        MPI.Request.Waitall(requests)

    return call


OPERATIONS: dict[str, Callable[[BenchArrays], Call]] = {
    "all_reduce": lambda buffers: partial(world.Allreduce, MPI.IN_PLACE, buffers.array),
    "broadcast": lambda buffers: partial(world.Bcast, buffers.array, 0),
    "reduce": reduce,
    "all_gather": lambda buffers: partial(world.Allgather, buffers.array, buffers.output),
    "gather": lambda buffers: partial(world.Gather, buffers.array, rows_or_none(buffers.output), 0),
    "scatter": lambda buffers: partial(world.Scatter, rows_or_none(buffers.blocks), buffers.array, 0),
    "reduce_scatter": lambda buffers: partial(world.Reduce_scatter_block, buffers.blocks, buffers.array),
    "all_to_all": lambda buffers: partial(world.Alltoall, buffers.blocks, buffers.output),
    "barrier": lambda buffers: world.Barrier,
    "send_recv": ping_pong,
    "window": window,
}

if __name__ == "__main__":
    library = " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].strip(" \0").split())
    serve(driver, world.Get_rank(), world.Get_size(), OPERATIONS, library)
