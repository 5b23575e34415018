"""Arguments are checked before a byte is sent, in words that name what was got and what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from procgroup.errors import ArgumentError
from procgroup.groups import checks
from procgroup.types import ReduceOp


@pytest.mark.parametrize("op", [op for op in ReduceOp if op.name != "PREMUL_SUM"])
def test_a_reduce_op_and_its_number_are_taken(op: ReduceOp) -> None:
    assert checks.reduce_op(op) is op
    assert checks.reduce_op(int(op)) is op


def test_premul_sum_is_taken_with_its_factor() -> None:
    op = ReduceOp.PREMUL_SUM(0.5)
    assert checks.reduce_op(op) is op
    assert (op.factor, op.op) == (0.5, ReduceOp.PREMUL_SUM)
    with pytest.raises(TypeError, match="ReduceOp.SUM takes no factor"):
        ReduceOp.SUM(2.0)


@pytest.mark.parametrize("op", ["SUM", None, True, 1.0, -1, 8, len(ReduceOp), sum, np.add])
def test_anything_else_is_told_all_the_ops(op: Any) -> None:
    with pytest.raises(TypeError, match="one of ReduceOp.SUM, ReduceOp.AVG, .*ReduceOp.BXOR.*, got .* of type "):
        checks.reduce_op(op)


@pytest.mark.parametrize("tag", [0, 1, checks.MAX_TAG])
def test_a_tag_is_taken(tag: int) -> None:
    assert checks.tag(tag) == tag


@pytest.mark.parametrize(
    ("tag", "error"),
    [(-1, ValueError), (checks.MAX_TAG + 1, ValueError), ("a", TypeError), (True, TypeError), (1.0, TypeError)],
)
def test_a_bad_tag_is_refused(tag: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Expected parameter `tag` to be"):
        checks.tag(tag)


@pytest.mark.parametrize("rank", [0, 3, np.int64(2), np.uint8(1)])
def test_a_rank_may_be_an_int_or_a_numpy_integer(rank: Any) -> None:
    checked = checks.group_rank(rank, 4, "0")
    assert (checked, type(checked)) == (int(rank), int)


@pytest.mark.parametrize("rank", [-1, 4, 1 << 70])
def test_a_rank_outside_the_group_is_told_its_ranks(rank: int) -> None:
    with pytest.raises(ValueError, match=f"Group rank {rank} is not part of group g, which has 4 ranks: 0 to 3"):
        checks.group_rank(rank, 4, "g")


@pytest.mark.parametrize("rank", ["0", 0.0, None, False, [0]])
def test_a_rank_of_another_type_is_refused(rank: Any) -> None:
    with pytest.raises(TypeError, match="Expected the group rank to be an int, got"):
        checks.group_rank(rank, 4, "g")


@pytest.mark.parametrize(
    ("arrays", "error"),
    [([1], ValueError), ([1, 2, 3], ValueError), (np.ones(2), TypeError), ({1, 2}, TypeError), (None, TypeError)],
)
def test_a_list_must_hold_one_array_for_each_rank(arrays: Any, error: type[Exception]) -> None:
    assert checks.array_list((1, 2), 2, "out", "all_gather", 1) == (1, 2)
    with pytest.raises(error, match="^all_gather on rank 1: .*`out`"):
        checks.array_list(arrays, 2, "out", "all_gather", 1)


def test_the_root_gives_a_list_and_nobody_else() -> None:
    for check, op, root in ((checks.gather_list, "gather", "destination"), (checks.scatter_list, "scatter", "source")):
        assert check([1, 2], 2, 1, 1) == [1, 2]
        assert check(None, 2, 1, 0) is None
        assert check([], 2, 1, 0) is None
        for missing in (None, [], ()):
            with pytest.raises(ValueError, match=f"^{op} on rank 1: .* must be specified on {root} rank 1"):
                check(missing, 2, 1, 1)
        with pytest.raises(
            ValueError, match=f"^{op} on rank 0: .* must NOT be specified on non-{root} ranks; .* is rank 1"
        ):
            check([1, 2], 2, 1, 0)
        with pytest.raises(ValueError, match=f"^{op} on rank 1: .*`{op}_list`.* length 2, one per rank, got 1"):
            check([1], 2, 1, 1)
        with pytest.raises(TypeError, match=f"^{op} on rank 1: .* to be a list of arrays"):
            check(np.ones(2), 2, 1, 1)


@pytest.mark.parametrize("sizes", [[1, 2], (1, 2), np.array([1, 2]), [np.int64(1), 2]])
def test_split_sizes_are_ints(sizes: Any) -> None:
    assert checks.splits(sizes, 2, "input_split_sizes", "all_to_all_single", 1) == [1, 2]


@pytest.mark.parametrize("shape", [(2, 3), [2, 3], np.array([2, 3]), (np.int64(2), 3)])
def test_the_shape_of_a_mesh_is_ints(shape: Any) -> None:
    assert checks.mesh_shape(shape, 6, "neighbor_all_to_all", 0) == (2, 3)


@pytest.mark.parametrize(
    ("periodic", "flags"),
    [
        (True, (True, True)),
        (0, (False, False)),
        ([True, False], (True, False)),
        ((1, 0), (1, 0)),
        (np.array([True, False]), (True, False)),
    ],
)
def test_each_dimension_of_a_mesh_is_periodic_or_not(periodic: Any, flags: tuple[bool, ...]) -> None:
    assert checks.periodicity(periodic, 2, "neighbor_all_to_all", 0) == flags


@pytest.mark.parametrize("sizes", [None, [], ()])
def test_no_split_sizes_mean_equal_parts(sizes: Any) -> None:
    assert checks.splits(sizes, 2, "input_split_sizes", "all_to_all_single", 1) is None


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ([1], ArgumentError),
        ([1, 2, 3], ArgumentError),
        ([1, -1], ArgumentError),
        ([1, 2**63], ArgumentError),
        ([1.0, 2], TypeError),
        ([True, 1], TypeError),
        ("12", TypeError),
        (2, TypeError),
    ],
)
def test_bad_split_sizes_are_refused_by_name(sizes: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="^all_to_all_single on rank 1: .*`input_split_sizes`"):
        checks.splits(sizes, 2, "input_split_sizes", "all_to_all_single", 1)
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ArgumentError, RuntimeError)
