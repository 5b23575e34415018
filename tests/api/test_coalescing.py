"""Coalesced calls do what as many single calls do; the manager issues nothing before its end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import procgroup as dist
from world import run


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def coalesce_everything(rank: int, size: int) -> None:
    """Each call on this rank, with closed-form expectations."""
    dist.init_process_group("gloo")
    arrays = [np.full(length, rank + 1.0) for length in (3, 0, 5)]
    assert dist.all_reduce_coalesced(arrays) is None
    total = size * (size + 1) / 2
    assert all((array == total).all() for array in arrays)

    future = dist.all_reduce_coalesced(arrays, dist.ReduceOp.MAX, async_op=True)
    assert [result.size for result in future.wait()] == [3, 0, 5]

    outputs = [[np.zeros(2), np.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [np.full(2, float(rank)), np.full(3, -float(rank))])
    assert all((left == other).all() and (right == -other).all() for other, (left, right) in enumerate(outputs))

    sums = [np.full(4, rank + place, np.int64) for place in range(3)]
    with dist._coalescing_manager() as manager:
        for array in sums:
            assert dist.all_reduce(array) is None
        assert [int(array[0]) for array in sums] == [rank, rank + 1, rank + 2]
    ranks = size * (size - 1) // 2
    assert [int(array[0]) for array in sums] == [ranks, ranks + size, ranks + 2 * size]
    assert manager.works == []

    gathered = [np.zeros(size * 2) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in gathered:
            dist.all_gather_single(output, np.full(2, float(rank)))
    manager.wait()
    assert all((output == np.repeat(np.arange(size), 2)).all() for output in gathered)

    scattered = np.zeros(2)
    with dist._coalescing_manager():
        dist.reduce_scatter_single(scattered, np.arange(2.0 * size))
    assert scattered.tolist() == [2.0 * rank * size, (2.0 * rank + 1) * size]
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["shm", "tcp", "spanning"])
def test_coalesced_calls_in_a_world(transport: str) -> None:
    run(coalesce_everything, 3, environment={"PROCGROUP_TRANSPORT": transport})


def test_coalesced_calls_alone(alone: None) -> None:
    arrays = [np.arange(3.0), np.arange(2.0)]
    dist.all_reduce_coalesced(arrays)  # a warning would be an error
    assert dist.all_reduce_coalesced([], async_op=True).wait() == []
    single = np.ones(2)
    assert dist.all_reduce_coalesced(single, async_op=True).value()[0] is single
    outputs = [[np.zeros(3), np.zeros(2)]]
    dist.all_gather_coalesced(outputs, arrays)
    assert outputs[0][1].tolist() == [0.0, 1.0]


def test_reduce_scatter_single_is_coalesced_too(alone: None) -> None:
    outputs = [np.zeros(2) for _ in range(3)]
    with dist._coalescing_manager():
        for place, output in enumerate(outputs):
            dist.reduce_scatter_single(output, np.full(2, float(place)))
        assert all((output == 0).all() for output in outputs)
    assert [float(output[0]) for output in outputs] == [0.0, 1.0, 2.0]


def test_lists_that_do_not_fit_are_refused(alone: None) -> None:
    with pytest.raises(ValueError, match="different dtypes: found float64 and float32"):
        dist.all_reduce_coalesced([np.ones(1), np.ones(1, np.float32)])
    with pytest.raises(TypeError, match="output_tensor_lists should be a list"):
        dist.all_gather_coalesced(np.ones(1), [np.ones(1)])
    with pytest.raises(ValueError, match="expected length 1, one per rank, got 2"):
        dist.all_gather_coalesced([[np.ones(1)], [np.ones(1)]], [np.ones(1)])
    with pytest.raises(ValueError, match="expected length 2, one per input, got 1"):
        dist.all_gather_coalesced([[np.ones(1)]], [np.ones(1), np.ones(1)])


def test_mixed_kinds_are_refused_and_the_group_goes_on(alone: None) -> None:
    with (
        pytest.raises(RuntimeError, match="requires all collectives to be the same type.*all_gather_single, all_red"),
        dist._coalescing_manager(),
    ):
        dist.all_reduce(np.ones(1))
        dist.all_gather_single(np.ones(1), np.ones(1))
    dist.barrier()


def test_nothing_is_issued_when_the_block_raises(alone: None) -> None:
    output = np.zeros(2)
    with pytest.raises(KeyError), dist._coalescing_manager():
        dist.all_gather_single(output, np.ones(2))
        raise KeyError
    assert output.tolist() == [0.0, 0.0]
    dist.all_gather_single(output, np.ones(2))
    assert output.tolist() == [1.0, 1.0]


def test_a_manager_inside_a_manager_is_refused(alone: None) -> None:
    with (
        pytest.raises(ValueError, match="non-empty op list at the start of coalescing"),
        dist._coalescing_manager(),
        dist._coalescing_manager(),
    ):
        pass


def test_what_is_queued_cannot_be_waited_for(alone: None) -> None:
    with dist._coalescing_manager(async_ops=True) as manager:
        work = dist.all_reduce(np.ones(1), async_op=True)
        for call in (work.wait, work.is_completed, work.exception, work.result, work.synchronize, work.get_future):
            with pytest.raises(ValueError, match="Illegal to call .* on IllegalWork object"):
                call()
        dist.broadcast(np.ones(1), 0)  # of another kind: issued at once
    manager.wait()
    (done,) = manager.works
    assert (done.is_completed(), done.is_success(), done.op) == (True, True, "all_reduce_coalesced")


def test_a_group_that_is_destroyed_meanwhile_says_so(alone: None) -> None:
    with pytest.raises(dist.GroupDestroyed), dist._coalescing_manager():
        dist.all_reduce(np.ones(1))
        dist.destroy_process_group()
