"""A rank of small_things.py with procgroup: ``procgroup run -n N small_with_procgroup.py SOCKET``."""

from __future__ import annotations

import functools
import sys
from typing import Any

from small_program import THING, Program, concatenate

import procgroup as dist
from procgroup import functional
from procgroup.diagnostics.bench.rank_loop import Call, Driver, serve


class Ours(Program):
    def exchange_edges(self) -> None:
        cells = self.cells
        cells[-1:] = functional.sendrecv(cells[1:2], dst=self.left, src=self.right)
        cells[:1] = functional.sendrecv(cells[-2:-1], dst=self.right, src=self.left)

    def put(self, thing: Any, rank: int) -> None:
        dist.send_object_list([thing], dst=rank)

    def take(self, rank: int) -> Any:
        things: list[Any] = [None]
        dist.recv_object_list(things, src=rank)
        return things[0]

    def take_any(self) -> tuple[Any, int]:
        things: list[Any] = [None]
        sender = dist.recv_object_list(things)
        return things[0], sender

    def meet(self) -> None:
        dist.barrier()

    def all_gather(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def broadcast(self) -> Any:
        things: list[Any] = [THING if self.rank == 0 else None]
        dist.broadcast_object_list(things, src=0)
        return things[0]

    def gather(self) -> Any:
        things: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(THING, things, dst=0)
        return things

    def scatter(self) -> Any:
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [THING] * self.size if self.rank == 0 else None, src=0)
        return mine[0]

    def largest(self) -> tuple[float, int]:
        numbers = functional.all_gather(float(self.rank))
        return max(numbers), numbers.index(max(numbers))

    def calls(self) -> dict[str, tuple[Call, Any]]:
        rank, size = self.rank, self.size
        return {
            "all_reduce_number": (lambda: functional.all_reduce(3.0), 3.0 * size),
            "all_gather_number": (lambda: functional.all_gather(3.0), [3.0] * size),
            "sendrecv_number": (lambda: functional.sendrecv(3.0, dst=self.right, src=self.left), 3.0),
            "broadcast_number": (lambda: functional.broadcast(3.0), 3.0),
            "all_reduce_integer": (lambda: functional.all_reduce(3), 3 * size),
            "all_gather_object": (lambda: self.all_gather(THING), [THING] * size),
            "broadcast_object": (self.broadcast, THING),
            "gather_object": (self.gather, [THING] * size if rank == 0 else None),
            "scatter_object": (self.scatter, THING),
            "max_and_rank": (self.largest, (size - 1.0, size - 1)),
            "own_op": (lambda: functools.reduce(concatenate, self.all_gather([rank])), list(range(size))),
            "all_reduce_tree": (lambda: functional.all_reduce(self.arrays), self.sums()),
        }


if __name__ == "__main__":
    driver = Driver(sys.argv[1])
    dist.init_process_group()
    program = Ours(dist.get_rank(), dist.get_world_size())
    serve(driver, program.rank, program.size, program.operations(), f"procgroup {dist.__version__}")
    dist.destroy_process_group()
