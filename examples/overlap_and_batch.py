"""Send fewer messages, and compute while they are under way.

    PROCGROUP_TRANSPORT=tcp python -m procgroup run --nproc-per-node 2 examples/overlap_and_batch.py
    python -m procgroup run --nproc-per-node 2 examples/overlap_and_batch.py

Over TCP, as between hosts, a message costs time of its own, whatever its size: 200 small tensors are summed faster as
one. In the shared memory of one host (the second command) a call costs so little that this hardly matters. With
async_op=True a call returns at once, and the sum is there when wait() returns: rank 0 computes while it would wait for
rank 1. Rank 0 prints the times, which are those of this machine.
"""

from collections.abc import Callable
from time import perf_counter, sleep

import torch

import procgroup as dist


def timed(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call that all ranks begin at the same time: the best of three."""
    times = []
    for _ in range(3):
        dist.barrier()
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times) * 1000


def one_by_one() -> None:
    for tensor in small:
        dist.all_reduce(tensor)


def as_one() -> None:
    together = torch.cat(small)
    dist.all_reduce(together)
    for tensor, total in zip(small, together.split([len(tensor) for tensor in small]), strict=True):
        tensor.copy_(total)


def compute() -> None:
    """Take a tenth of a second."""
    end = perf_counter() + 0.1
    while perf_counter() < end:
        torch.mm(matrix, matrix)


def one_after_the_other() -> None:
    if rank == 1:
        sleep(0.1)  # reads its data
    dist.all_reduce(large)
    if rank == 0:
        compute()


def at_the_same_time() -> None:
    if rank == 1:
        sleep(0.1)
    work = dist.all_reduce(large, async_op=True)
    if rank == 0:
        compute()
    work.wait()


torch.set_num_threads(1)
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
small = [torch.ones(10) for _ in range(200)]
large = torch.zeros(100_000)
matrix = torch.ones(100, 100)
times = {
    "200 calls": timed(one_by_one),
    "one call for all 200": timed(as_one),
    "compute after all_reduce": timed(one_after_the_other),
    "compute while all_reduce is under way": timed(at_the_same_time),
}
assert all((tensor == size**6).all() for tensor in small)  # three times each way

# Four messages to one neighbour on a ring and four from the other, all under way together.
left, right = (rank - 1) % size, (rank + 1) % size
out = [torch.full((3,), 10.0 * rank + number) for number in range(4)]
into = [torch.empty(3) for _ in out]
calls = [dist.P2POp(dist.isend, tensor, right) for tensor in out]
calls += [dist.P2POp(dist.irecv, tensor, left) for tensor in into]
for work in dist.batch_isend_irecv(calls):
    work.wait()
assert [tensor[0].item() for tensor in into] == [10.0 * left + number for number in range(4)]

if rank == 0:
    for name, milliseconds in times.items():
        print(f"{name}: {milliseconds:.2f} ms")
dist.destroy_process_group()
