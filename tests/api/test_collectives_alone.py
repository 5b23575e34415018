"""Every collective in a world of 1 copies what it reads to where it writes, and checks what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import procgroup as dist

Call = Callable[[Any, Any], Any]

# Each call with (input, output) of one size.
COPIES: dict[str, Call] = {
    "gather": lambda source, target: dist.gather(source, [target]),
    "gather to 0": lambda source, target: dist.gather(source, [target], group_dst=0),
    "all_gather": lambda source, target: dist.all_gather([target], source),
    "all_gather_single": lambda source, target: dist.all_gather_single(target, source),
    "scatter": lambda source, target: dist.scatter(target, [source]),
    "scatter from 0": lambda source, target: dist.scatter(target, [source], src=0),
    "reduce_scatter": lambda source, target: dist.reduce_scatter(target, [source]),
    "reduce_scatter_single": lambda source, target: dist.reduce_scatter_single(target, source, dist.ReduceOp.MAX),
    "all_to_all": lambda source, target: dist.all_to_all([target], [source]),
    "all_to_all_single": lambda source, target: dist.all_to_all_single(target, source),
    "all_to_all_single by rows": lambda source, target: dist.all_to_all_single(
        target, source, list(np.shape(target)[:1]), list(np.shape(source)[:1])
    ),
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str) -> None:
    for source in (
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.ones((), ml_dtypes.bfloat16),
        np.zeros(0, np.int8),
        np.arange(7, dtype=np.uint16),
    ):
        before = source.copy()
        target = np.full_like(source, 9)
        assert COPIES[name](source, target) is None
        assert (target == before).all()
        assert (source == before).all()


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize(
    ("source", "target", "error", "text"),
    [
        (np.ones(3), np.ones(3, np.float32), ValueError, "different dtypes"),
        (np.ones(3), np.ones(4), ValueError, "on rank 0: .*(has|holds|expects|expected) 4"),
        (np.ones(3), "text", TypeError, "Expected parameter"),
        (None, np.ones(3), TypeError, "Expected parameter"),
    ],
    ids=["dtypes", "sizes", "not an output", "not an input"],
)
def test_arrays_that_do_not_fit_are_refused(
    name: str, source: Any, target: Any, error: type[Exception], text: str
) -> None:
    before = np.copy(target)
    with pytest.raises(error, match=text):
        COPIES[name](source, target)
    assert (np.asarray(target) == before).all()


def test_a_read_only_output_is_refused() -> None:
    target = np.ones(3)
    target.flags.writeable = False
    for name, call in COPIES.items():
        with pytest.raises(ValueError, match="read-only"):
            call(np.ones(3), target)
            pytest.fail(name)


def test_splits_must_add_up_to_the_rows() -> None:
    for splits in ({"output_split_sizes": [2]}, {"input_split_sizes": [4]}):
        with pytest.raises(RuntimeError, match="Split sizes doesn't match total dim 0 size"):
            dist.all_to_all_single(np.ones(3), np.ones(3), **splits)
    with pytest.raises(RuntimeError, match="Number of tensor splits not equal to group size"):
        dist.all_to_all_single(np.ones(3), np.ones(3), [1, 2], None)


def test_asynchronous_calls_return_their_outputs() -> None:
    source, target = np.arange(3), np.zeros(3, np.int64)
    for work in (
        dist.gather(source, [target], async_op=True),
        dist.all_gather_single(target, source, async_op=True),
        dist.scatter(target, [source], async_op=True),
        dist.reduce_scatter(target, [source], async_op=True),
        dist.reduce_scatter_single(target, source, async_op=True),
        dist.all_to_all([target], [source], async_op=True),
        dist.all_to_all_single(target, source, async_op=True),
    ):
        assert work.wait() is True
        (result,) = work.result()
        assert result is target


def test_premul_sum_multiplies_by_the_factor() -> None:
    op = dist.ReduceOp.PREMUL_SUM(0.5)
    values = np.arange(4, dtype=np.float32)
    dist.all_reduce(values, op)
    assert values.tolist() == [0.0, 0.5, 1.0, 1.5]
    output = np.zeros(4, np.float32)
    dist.reduce_scatter_single(output, values.reshape(2, 2), op)
    assert output.tolist() == [0.0, 0.25, 0.5, 0.75]
    with pytest.raises(TypeError, match="needs a factor"):
        dist.all_reduce(values, dist.ReduceOp.PREMUL_SUM)


def test_one_root_is_named_one_way() -> None:
    with pytest.raises(ValueError, match="Can't specify both group_rank and global_rank"):
        dist.gather(np.ones(1), [np.ones(1)], 0, group_dst=0)
    with pytest.raises(ValueError, match="Can't specify both group_rank and global_rank"):
        dist.scatter(np.ones(1), [np.ones(1)], 0, group_src=0)
