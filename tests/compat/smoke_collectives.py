"""Smoke programs of the collectives, the messages and the Work they return, on two ranks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from compat.registry import shows

import procgroup as dist


@shows("all_reduce", "ReduceOp")
def all_reduce() -> None:
    array = np.arange(3.0) + dist.get_rank()
    dist.all_reduce(array, dist.ReduceOp.MAX)
    assert array.tolist() == [1.0, 2.0, 3.0]
    dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(0.25))
    assert array.tolist() == [0.5, 1.0, 1.5]


@shows("reduce")
def reduce() -> None:
    array = np.ones(2)
    dist.reduce(array, 1)
    assert array.tolist() == [1.0 + dist.get_rank()] * 2


@shows("broadcast")
def broadcast() -> None:
    array = np.full(2, dist.get_rank())
    dist.broadcast(array, group_src=1)
    assert array.tolist() == [1, 1]


@shows("gather")
def gather() -> None:
    outputs = [np.zeros(2) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(np.full(2, dist.get_rank() + 1.0), outputs)
    assert outputs is None or [output[0] for output in outputs] == [1.0, 2.0]


@shows("all_gather")
def all_gather() -> None:
    outputs = [np.zeros(1), np.zeros(2)]
    dist.all_gather(outputs, np.full(dist.get_rank() + 1, 5.0))
    assert [output.tolist() for output in outputs] == [[5.0], [5.0, 5.0]]


@shows("all_gather_single")
def all_gather_single() -> None:
    output = np.zeros(2)
    dist.all_gather_single(output, np.full(1, dist.get_rank() + 1.0))
    assert output.tolist() == [1.0, 2.0]


@shows("scatter")
def scatter() -> None:
    array = np.zeros(1)
    dist.scatter(array, [np.ones(1), np.full(1, 2.0)] if dist.get_rank() == 0 else None)
    assert array[0] == dist.get_rank() + 1


@shows("reduce_scatter")
def reduce_scatter() -> None:
    output = np.zeros(1)
    dist.reduce_scatter(output, [np.full(1, 3.0), np.full(1, 4.0)])
    assert output[0] == 6.0 + 2 * dist.get_rank()


@shows("reduce_scatter_single")
def reduce_scatter_single() -> None:
    output = np.zeros(1)
    dist.reduce_scatter_single(output, np.array([3.0, 4.0]))
    assert output[0] == 6.0 + 2 * dist.get_rank()


@shows("all_to_all")
def all_to_all() -> None:
    outputs = [np.zeros(1), np.zeros(1)]
    dist.all_to_all(outputs, [np.full(1, 10.0 * dist.get_rank()), np.full(1, 10.0 * dist.get_rank() + 1)])
    assert [output[0] for output in outputs] == [dist.get_rank(), 10.0 + dist.get_rank()]


@shows("all_to_all_single")
def all_to_all_single() -> None:
    output = np.zeros(3)
    mine = [1, 2] if dist.get_rank() == 0 else [2, 1]
    dist.all_to_all_single(output, np.full(3, dist.get_rank() + 1.0), mine, mine)
    assert output.tolist() == ([1.0, 2.0, 2.0] if dist.get_rank() == 0 else [1.0, 1.0, 2.0])


@shows("barrier")
def barrier() -> None:
    assert dist.barrier(async_op=True).wait()
    with pytest.raises(TypeError, match="device_ids"):
        dist.barrier(device_ids=0)


def deprecated(name: str, *arguments: object) -> None:
    with pytest.warns(FutureWarning, match=name):
        getattr(dist, name)(*arguments)


@shows("all_gather_into_tensor", ranks=1)
def all_gather_into_tensor() -> None:
    output = np.zeros(1)
    deprecated("all_gather_into_tensor", output, np.ones(1))
    assert output[0] == 1


@shows("reduce_scatter_tensor", ranks=1)
def reduce_scatter_tensor() -> None:
    output = np.zeros(1)
    deprecated("reduce_scatter_tensor", output, np.ones(1))
    assert output[0] == 1


@shows("all_reduce_coalesced", ranks=1)
def all_reduce_coalesced() -> None:
    arrays = [np.ones(1), np.ones(2)]
    dist.all_reduce_coalesced(arrays, dist.ReduceOp.PREMUL_SUM(2.0))
    assert [array[0] for array in arrays] == [2.0, 2.0]


@shows("all_gather_coalesced", ranks=1)
def all_gather_coalesced() -> None:
    outputs = [[np.zeros(1), np.zeros(2)]]
    dist.all_gather_coalesced(outputs, [np.ones(1), np.ones(2)])
    assert outputs[0][1].tolist() == [1.0, 1.0]


@shows("reduce_op", ranks=0)
def reduce_op() -> None:
    with pytest.warns(FutureWarning, match="reduce_op"):
        assert dist.reduce_op.SUM is dist.ReduceOp.SUM


@shows("send", "recv")
def send_and_receive() -> None:
    array = np.zeros(2)
    if dist.get_rank() == 0:
        dist.send(np.ones(2), 1, tag=3)
    else:
        assert dist.recv(array, tag=3) == 0
        assert array.tolist() == [1.0, 1.0]


@shows("isend", "irecv", "Work.wait", "Work.source_rank")
def isend_and_irecv() -> None:
    other = 1 - dist.get_rank()
    array = np.zeros(2)
    receiving = dist.irecv(array, other)
    assert dist.isend(np.full(2, dist.get_rank() + 1.0), other).wait()
    assert receiving.wait()
    assert receiving.source_rank() == other
    assert array[0] == other + 1


@shows("P2POp", "batch_isend_irecv")
def batch() -> None:
    other = 1 - dist.get_rank()
    array = np.zeros(1)
    operations = [dist.P2POp(dist.irecv, array, other), dist.P2POp(dist.isend, np.full(1, other + 1.0), other)]
    works = dist.batch_isend_irecv(operations)
    assert len(works) == 2
    for work in works:
        work.wait()
    assert array[0] == dist.get_rank() + 1


@shows("Work", ranks=1)
def work_is_what_calls_return() -> None:
    assert isinstance(dist.barrier(async_op=True), dist.Work)


@shows("Work.is_completed", "Work.is_success", "Work.result", "Work.get_future", ranks=1)
def work_of_a_call_that_went_well() -> None:
    array = np.ones(1)
    work = dist.all_reduce(array, async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0] is array
    assert work.get_future().wait()[0] is array


@shows("Work.exception", "Work.synchronize", "Work.block_current_stream", ranks=2)
def work_of_a_call_that_failed() -> None:
    work = dist.irecv(np.zeros(1))
    dist.group.WORLD.abort()
    for wait in (work.synchronize, work.block_current_stream):
        with pytest.raises(dist.DistError):
            wait()
    assert isinstance(work.exception(), dist.DistError)


@shows("supports_complex", ranks=0)
def supports_complex() -> None:
    assert dist.supports_complex(dist.ReduceOp.SUM) is True
    assert dist.supports_complex(dist.ReduceOp.MAX) is False


@shows("breakpoint", ranks=1)
def breakpoint_waits_and_sets_the_timeout() -> None:
    with warnings.catch_warnings():
        dist.breakpoint(rank=1, timeout_s=77)
    assert dist.group.WORLD.timeout.total_seconds() == 77
