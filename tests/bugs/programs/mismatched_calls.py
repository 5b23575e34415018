"""Ranks whose collective calls differ.

Calls with a root are large here: after a small one some ranks learn of it in their next call (see
tests/failures/test_rooted_calls.py), and these programs end.
"""

from __future__ import annotations

from bugs.bug import LONG_TIMEOUT, deadlock, death, mismatch
from bugs.library import array, dist, expect, full, join, limit

LARGE = 20_000
"""Elements of a call in which all ranks wait for all."""


@mismatch()
def operation_differs() -> None:
    """Rank 1 broadcasts where the others add."""
    join()
    values = full(LARGE, 1.0)
    if dist.get_rank() == 1:
        dist.broadcast(values, src=0)  # BUG
    else:
        dist.all_reduce(values)


@mismatch()
def dtype_differs() -> None:
    """Rank 1 has read its data as float64, the others as float32."""
    join()
    dtype = "float64" if dist.get_rank() == 1 else "float32"
    dist.all_reduce(array([1.0, 2.0], dtype))  # BUG


@mismatch(guilty=(2,))
def dtype_of_the_same_size_differs() -> None:
    """Rank 2 counts in int32 where the others have float32: as many bytes, with another meaning."""
    join()
    values = array([1, 2, 3], "int32" if dist.get_rank() == 2 else "float32")
    dist.all_reduce(values)  # BUG


@mismatch()
def count_differs() -> None:
    """The last batch of rank 1 is one row shorter."""
    join()
    rows = 9 if dist.get_rank() == 1 else 10
    dist.all_reduce(full(rows, 1.0))  # BUG


@mismatch()
def count_of_a_large_array_differs() -> None:
    """A model of four million parameters has one more on rank 1."""
    join()
    dist.all_reduce(full(4_000_000 + (dist.get_rank() == 1), 1.0))  # BUG


@mismatch()
def reduce_op_differs() -> None:
    """Rank 1 takes the maximum where the others add."""
    join()
    values = array([2.0, 3.0])
    op = dist.ReduceOp.MAX if dist.get_rank() == 1 else dist.ReduceOp.SUM
    dist.all_reduce(values, op)  # BUG


@mismatch()
def root_differs() -> None:
    """Rank 1 takes itself for the rank that has read the configuration."""
    join()
    values = full(LARGE, float(dist.get_rank()))
    dist.broadcast(values, src=1 if dist.get_rank() == 1 else 0)  # BUG


@mismatch(size=4)
def root_of_a_reduction_differs() -> None:
    """Rank 1 sends its share of the loss to rank 3, the others to rank 0."""
    join()
    loss = full(LARGE, 1.0)
    dist.reduce(loss, dst=3 if dist.get_rank() == 1 else 0)  # BUG


@mismatch()
def destination_of_a_gather_differs() -> None:
    """Rank 1 collects the results, and so does rank 0."""
    join()
    rank, size = dist.get_rank(), dist.get_world_size()
    collecting = 1 if rank == 1 else 0
    outputs = [full(LARGE, 0.0) for _ in range(size)] if rank == collecting else None
    dist.gather(full(LARGE, float(rank)), outputs, dst=collecting)  # BUG


@mismatch()
def sizes_of_an_all_gather_differ() -> None:
    """Rank 1 gathers three numbers of each rank, the others two."""
    join()
    count = 3 if dist.get_rank() == 1 else 2
    outputs = [full(count, 0.0) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, full(count, 1.0))  # BUG


@mismatch()
def sizes_of_a_reduce_scatter_differ() -> None:
    """Rank 1 has divided its gradients into blocks of five elements, the others into blocks of four."""
    join()
    count = 5 if dist.get_rank() == 1 else 4
    inputs = [full(count, 1.0) for _ in range(dist.get_world_size())]
    dist.reduce_scatter(full(count, 0.0), inputs)  # BUG


@mismatch(guilty=(0,))
def scattered_blocks_are_too_long() -> None:
    """Rank 0 deals out blocks of some rows more than the others expect."""
    join()
    rank, size = dist.get_rank(), dist.get_world_size()
    count = LARGE + 1 if rank == 0 else LARGE
    blocks = [full(count, float(block)) for block in range(size)] if rank == 0 else None
    dist.scatter(full(count, 0.0), blocks, src=0)  # BUG


@mismatch()
def split_sizes_disagree() -> None:
    """Rank 1 expects two rows of rank 0, which sends it one."""
    join()
    expected = [2, 1, 1] if dist.get_rank() == 1 else [1, 1, 1]
    dist.all_to_all_single(full(sum(expected), 0.0), full(3, 1.0), expected, [1, 1, 1])  # BUG


@mismatch()
def calls_are_swapped() -> None:
    """Rank 1 makes two calls in the other order."""
    join()
    weights, losses = array([1.0, 2.0]), array([3.0, 4.0])
    if dist.get_rank() == 1:
        dist.all_reduce(losses)  # BUG
        dist.broadcast(weights, src=0)
    else:
        dist.broadcast(weights, src=0)
        dist.all_reduce(losses)


@mismatch()
def arrays_are_swapped() -> None:
    """A set iterates in another order on rank 1, which adds the layers' gradients in that order."""
    join()
    layers = [full(4, 1.0), full(6, 2.0)]
    for layer in reversed(layers) if dist.get_rank() == 1 else layers:
        dist.all_reduce(layer)  # BUG


@mismatch("CollectiveMismatch", "GroupBroken", has_line=False)
def asynchronous_calls_are_swapped() -> None:
    """Rank 1 issues two asynchronous calls in the other order, and all wait for both.

    The second call of another rank may find that the group has ended, which has no line.
    """
    join()
    layers = [full(100_000, 1.0), full(6, 2.0)]
    ordered = reversed(layers) if dist.get_rank() == 1 else layers
    works = [dist.all_reduce(layer, async_op=True) for layer in ordered]  # BUG
    for work in works:
        work.wait()


@deadlock("Deadlock", "CollectiveMismatch", "PeerFailed")
def groups_are_swapped() -> None:
    """Rank 1 uses two groups in the other order, so that each group waits for ranks that are in the other."""
    join(LONG_TIMEOUT)
    groups = [dist.new_group(timeout=limit(LONG_TIMEOUT)) for _ in range(2)]
    for group in reversed(groups) if dist.get_rank() == 1 else groups:
        dist.all_reduce(array([1.0]), group=group)  # BUG


@deadlock("Deadlock", "CollectiveMismatch", "PeerFailed")
def group_is_forgotten() -> None:
    """Rank 1 forgets `group=`, so that its call is one of the whole world."""
    join(LONG_TIMEOUT)
    pair = dist.new_group([0, 1], timeout=limit(LONG_TIMEOUT))
    loss = array([1.0])
    if dist.get_rank() == 0:
        dist.all_reduce(loss, group=pair)
    elif dist.get_rank() == 1:
        dist.all_reduce(loss)  # BUG
    dist.barrier()


@mismatch(guilty=(0,))
def only_rank_0_calls() -> None:
    """Rank 0 alone waits at a barrier, after it has saved a checkpoint."""
    join()
    if dist.get_rank() == 0:
        dist.barrier()  # BUG
    dist.all_reduce(array([1.0]))


@mismatch()
def call_is_skipped() -> None:
    """Rank 1 finds no data for one step and leaves its call out, so that its next call meets the others' former one."""
    join()
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            continue
        total = full(10 + step, 1.0)
        dist.all_reduce(total)  # BUG
        expect(total, 3.0)


@mismatch()
def batches_run_out_before_a_barrier() -> None:
    """Rank 1 has two batches, the others three: it is at the end of the epoch where they add gradients."""
    join()
    for _ in range(2 if dist.get_rank() == 1 else 3):
        total = full(4, 1.0)
        dist.all_reduce(total)
        expect(total, 3.0)
    dist.barrier()  # BUG


@death()
def batches_run_out() -> None:
    """Rank 1 has two batches, the others three, and its program ends."""
    join()
    for _ in range(2 if dist.get_rank() == 1 else 3):
        total = full(4, 1.0)
        dist.all_reduce(total)  # BUG
        expect(total, 3.0)
    dist.destroy_process_group()


@death(victims=(1,), names=(0, 2))
def one_call_too_many() -> None:
    """Rank 1 makes one more call, when the others have left."""
    join()
    for _ in range(3 if dist.get_rank() == 1 else 2):
        total = full(4, 1.0)
        dist.all_reduce(total)  # BUG
        expect(total, 3.0)


@mismatch()
def object_meets_an_array() -> None:
    """Rank 1 receives an object where rank 0 broadcasts an array."""
    join()
    if dist.get_rank() == 1:
        dist.broadcast_object_list([None], src=0)  # BUG
    else:
        dist.broadcast(full(LARGE, 1.0), src=0)
