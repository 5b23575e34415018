"""What programs do with procgroup's types, as mypy and pyright see it: `make check` checks this file, a test runs it.

``assert_type`` holds what a type checker infers. Each ``type: ignore`` is an error that both are to find: mypy refuses
one that is not needed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import procgroup as dist
from procgroup import functional
from procgroup.parallel import DistributedSampler, average_gradients, broadcast_parameters
from procgroup.testing import run_ranks

Floats = NDArray[np.float64]


def asynchronous_calls(array: Floats, flag: bool) -> None:
    """``async_op`` decides whether there is a Work to wait for."""
    assert_type(dist.all_reduce(array, async_op=True), dist.Work).wait()
    assert_type(dist.all_reduce(array, dist.ReduceOp.MAX, None, True), dist.Work).wait(timedelta(seconds=30))
    assert_type(dist.broadcast(array, 0, async_op=True), dist.Work).wait(30)
    perhaps = assert_type(dist.all_reduce(array, async_op=flag), dist.Work | None)
    if perhaps is not None:
        perhaps.wait()
    dist.all_reduce(array, op=dist.ReduceOp.PREMUL_SUM(0.5), timeout=timedelta(seconds=30))

    rank, size = dist.get_rank(), dist.get_world_size()
    both, parts = np.zeros(size * array.size), [np.zeros_like(array) for _ in range(size)]
    works = [
        assert_type(dist.reduce(array, 0, async_op=True), dist.Work),
        assert_type(dist.all_gather(parts, array, async_op=True), dist.Work),
        assert_type(dist.all_gather_single(both, array, async_op=True), dist.Work),
        assert_type(dist.gather(array, parts if rank == 0 else None, async_op=True), dist.Work),
        assert_type(dist.scatter(array, parts if rank == 0 else None, async_op=True), dist.Work),
        assert_type(dist.reduce_scatter(array, parts, async_op=True), dist.Work),
        assert_type(dist.reduce_scatter_single(array, both, async_op=True), dist.Work),
        assert_type(dist.all_to_all(parts, [array] * size, async_op=True), dist.Work),
        assert_type(dist.all_to_all_single(both, both.copy(), async_op=True), dist.Work),
        assert_type(dist.barrier(async_op=True), dist.Work),
    ]
    for work in works:
        assert_type(work.wait(), bool)
    assert_type(works[0].get_future().then(lambda future: future.value()).done(), bool)


def methods_of_groups(array: Floats) -> None:
    """A group's methods have the same types."""
    group = dist.new_group()
    assert_type(group.all_reduce(array, async_op=True), dist.Work).wait()
    assert_type(group.broadcast(array, 0, True), dist.Work).wait()
    assert_type(group.barrier(True), dist.Work).wait()
    assert_type(group.barrier(async_op=len(array) > 0), dist.Work | None)
    assert_type(group.all_reduce_coalesced([array, array], async_op=True), dist.Work).wait()


def messages(array: Floats) -> None:
    """``isend`` and ``irecv`` return what can be waited for."""
    peer = dist.get_world_size() - 1 - dist.get_rank()
    works = [assert_type(dist.isend(array, peer), dist.Work), assert_type(dist.irecv(array.copy(), peer), dist.Work)]
    for work in works:
        work.wait()
    batch = [dist.P2POp(dist.isend, array, peer), dist.P2POp(dist.irecv, array.copy(), peer)]
    for work in assert_type(dist.batch_isend_irecv(batch), list[dist.Work]):
        work.wait()


def groups(array: Floats) -> None:
    """What ``new_group`` returns is a group, also where this rank is not in it."""
    first = assert_type(dist.new_group([0]), dist.ProcessGroup)
    if first != dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(array, group=first)
    assert_type(dist.get_rank(first), int)
    mine, made = dist.new_subgroups(1)
    dist.barrier(mine)
    assert_type(made, list[dist.ProcessGroup])
    some = dist.split_group(split_ranks=[[0]])
    if some is not None:
        assert_type(some.size(), int)
    world = dist.group.WORLD
    assert world is not None
    assert_type(dist.get_process_group_ranks(world), list[int])
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    dist.all_reduce(array, group=assert_type(mesh.get_group("data"), dist.ProcessGroup))
    assert_type(mesh["data"].get_local_rank(), int)


def objects() -> None:
    """Objects fill a list of any type."""
    gathered: list[dict[str, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    shared = ["settings"]
    dist.broadcast_object_list(shared, 0, timeout=5)
    if dist.get_rank() == 0:
        dist.send_object_list([1, "two"], 1)
    elif dist.get_rank() == 1:
        assert_type(dist.recv_object_list([None, None], 0), int)


def trees_of_arrays(array: Floats) -> None:
    """Functions of trees return the type that they are given."""
    parameters = {"weight": array, "bias": array[:1]}
    assert_type(broadcast_parameters(parameters), dict[str, Floats])
    assert_type(average_gradients(parameters), dict[str, Floats])
    assert_type(functional.all_reduce([array, array]), list[Floats])
    assert_type(functional.broadcast((array, 2 * array)), tuple[Floats, Floats])


def allocated_arrays(array: Floats) -> None:
    """Arrays in shared memory are NumPy's, or of the type of ``like``."""
    assert_type(dist.zeros((2, 3)), NDArray[Any])
    assert_type(dist.empty(3, like=array), Floats)
    dist.all_reduce(dist.full(3, 1.0))


def samplers() -> None:
    """A sampler yields indices of what can be indexed, and what another sampler yields."""
    data = ["a", "b", "c"]
    for index in assert_type(DistributedSampler(data, num_replicas=2, rank=0), DistributedSampler[int]):
        assert_type(data[index], str)
    batches = ([index, index + 1] for index in range(0, 8, 2))
    for batch in DistributedSampler(batches, num_replicas=2, rank=0):
        assert_type(batch, list[int])


def stores() -> None:
    """Timeouts are timedeltas or seconds."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.set("key", b"value")
    assert_type(store.get("key", timeout=1.5), bytes)
    assert_type(dist.PrefixStore("job", store).add("count", 1), int)


def errors(array: Floats) -> None:
    """Errors have attributes with types."""
    try:
        dist.monitored_barrier(timeout=30)
    except dist.CollectiveTimeout as error:
        assert_type(error.missing, tuple[int, ...])


def mistakes(array: Floats) -> None:
    """What fails at run time is an error of types."""
    dist.all_reduce([1.0, 2.0])  # type: ignore[call-overload]  # a list is no array
    dist.all_reduce(array).wait()  # type: ignore[func-returns-value,attr-defined,unused-ignore]  # nothing to wait for
    dist.broadcast(array, "0")  # type: ignore[call-overload]
    dist.all_reduce(array, op="sum")  # type: ignore[call-overload]
    dist.new_group(3)  # type: ignore[arg-type]
    dist.barrier(timeout="1 s")  # type: ignore[call-overload]
    run_ranks(objects, 2, "one argument too many")  # type: ignore[arg-type]


def on_each_rank(count: int) -> int:
    """Make all the calls that are no mistakes."""
    array = np.ones(count)
    asynchronous_calls(array, True)
    methods_of_groups(array)
    messages(array)
    groups(array)
    objects()
    trees_of_arrays(array)
    allocated_arrays(array)
    samplers()
    stores()
    errors(array)
    return dist.get_rank()


def main() -> None:
    """Run them on two ranks, which are threads."""
    assert_type(run_ranks(on_each_rank, 2, 4), list[int])


if __name__ == "__main__":
    main()
