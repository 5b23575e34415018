"""CuPy's arrays on GPUs: all ranks, groups of some of them, and computing while a call is under way.

    procgroup run --nproc-per-node gpu examples/cupy_groups.py

It needs NVIDIA's GPUs, one for each process, CuPy (pip install cupy-cuda13x) and NCCL (pip install
'procgroup[nccl-cu13]'). Where CuPy is missing it says so, and ends.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import procgroup as dist

try:
    import cupy
except ImportError:
    sys.exit("This example needs CuPy and a GPU for each process: pip install cupy-cuda13x 'procgroup[nccl-cu13]'")


def main() -> None:
    cupy.cuda.Device(int(os.environ["LOCAL_RANK"])).use()
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()

    everybody = cupy.full(4, rank + 1, dtype="float32")
    dist.all_reduce(everybody)
    print(f"rank {rank}: all ranks: {everybody.get().tolist()}")

    # All ranks make both groups, in the same order. Each group has a communicator of NCCL of its own.
    evens, odds = dist.new_group(list(range(0, size, 2))), dist.new_group(list(range(1, size, 2)) or [0])
    mine: Any = evens if rank % 2 == 0 else odds
    alike = cupy.full(4, rank, dtype="float32")
    dist.all_reduce(alike, group=mine)
    print(f"rank {rank}: the {'even' if rank % 2 == 0 else 'odd'} ranks: {alike.get().tolist()}")

    # The call waits for what is queued on the current stream, and goes on beside what is queued later.
    largest = cupy.full(1 << 20, rank, dtype="float32")
    work: Any = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
    squares = cupy.arange(1000) ** 2
    work.wait()  # the current stream waits for the call; the host does not
    print(f"rank {rank}: the largest is {largest[:1].get().tolist()}, and meanwhile {int(squares.sum())}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
