"""procgroup as a peer: ``procgroup run -n N -m ...bench.peers.procgroup_peer SOCKET [--symmetric | --mpi]``.

With ``--symmetric`` all arrays are in shared memory, from ``procgroup.empty``. With ``--mpi``, under mpiexec, MPI moves
the bytes.
"""

from __future__ import annotations

import sys
from typing import Any

import procgroup as dist
from procgroup.diagnostics.bench.rank_loop import DTYPE, Driver, ordinary, serve, torch_operations


def symmetric(shape: tuple[int, ...]) -> Any:
    return dist.empty(shape, dtype=DTYPE)


if __name__ == "__main__":
    driver = Driver(sys.argv[1])
    dist.init_process_group("mpi" if "--mpi" in sys.argv else "gloo")
    allocate = symmetric if "--symmetric" in sys.argv else ordinary
    known = torch_operations(dist, dist.reduce_scatter_single, lambda array: array)
    serve(driver, dist.get_rank(), dist.get_world_size(), known, f"procgroup {dist.__version__}", allocate)
    dist.destroy_process_group()
