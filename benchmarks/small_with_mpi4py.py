"""A rank of small_things.py with mpi4py: ``mpiexec -n N python small_with_mpi4py.py SOCKET``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from small_program import THING, Program, concatenate

from procgroup.diagnostics.bench.rank_loop import Call, Driver, serve

driver = Driver(sys.argv[1])

from mpi4py import MPI  # noqa: E402  (importing it is MPI_Init, which can get stuck: the driver comes first)

world = MPI.COMM_WORLD
status = MPI.Status()


class Theirs(Program):
    def exchange_edges(self) -> None:
        cells = self.cells
        world.Sendrecv(cells[1:2], dest=self.left, recvbuf=cells[-1:], source=self.right)
        world.Sendrecv(cells[-2:-1], dest=self.right, recvbuf=cells[:1], source=self.left)

    def put(self, thing: Any, rank: int) -> None:
        world.send(thing, dest=rank)

    def take(self, rank: int) -> Any:
        return world.recv(source=rank)

    def take_any(self) -> tuple[Any, int]:
        return world.recv(source=MPI.ANY_SOURCE, status=status), status.Get_source()

    def meet(self) -> None:
        world.Barrier()

    def scatter(self) -> Any:
        return world.scatter([THING] * self.size if self.rank == 0 else None)

    def add(self) -> dict[str, Any]:
        results = {}
        for name, array in self.arrays.items():
            results[name] = np.empty_like(array)
            world.Allreduce(array, results[name])
        return results

    def calls(self) -> dict[str, tuple[Call, Any]]:
        rank, size = self.rank, self.size
        return {
            "all_reduce_number": (lambda: world.allreduce(3.0), 3.0 * size),
            "all_gather_number": (lambda: world.allgather(3.0), [3.0] * size),
            "sendrecv_number": (lambda: world.sendrecv(3.0, dest=self.right, source=self.left), 3.0),
            "broadcast_number": (lambda: world.bcast(3.0), 3.0),
            "all_reduce_integer": (lambda: world.allreduce(3), 3 * size),
            "all_gather_object": (lambda: world.allgather(THING), [THING] * size),
            "broadcast_object": (lambda: world.bcast(THING if rank == 0 else None), THING),
            "gather_object": (lambda: world.gather(THING), [THING] * size if rank == 0 else None),
            "scatter_object": (self.scatter, THING),
            "max_and_rank": (lambda: world.allreduce((float(rank), rank), op=MPI.MAXLOC), (size - 1.0, size - 1)),
            "own_op": (lambda: world.allreduce([rank], op=concatenate), list(range(size))),
            "all_reduce_tree": (self.add, self.sums()),
        }


if __name__ == "__main__":
    program = Theirs(world.Get_rank(), world.Get_size())
    library = MPI.Get_library_version().split(",")[0].splitlines()[0]
    serve(driver, program.rank, program.size, program.operations(), library)
