"""Arguments are checked before a byte is sent, in words that name what was got and what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from procgroup.groups import checks
from procgroup.types import ReduceOp


@pytest.mark.parametrize("op", list(ReduceOp))
def test_a_reduce_op_and_its_number_are_taken(op: ReduceOp) -> None:
    assert checks.reduce_op(op) is op
    assert checks.reduce_op(int(op)) is op


@pytest.mark.parametrize("op", ["SUM", None, True, 1.0, -1, 8, sum, np.add])
def test_anything_else_is_told_all_the_ops(op: Any) -> None:
    with pytest.raises(TypeError, match="one of ReduceOp.SUM, ReduceOp.AVG, .*ReduceOp.BXOR, got .* of type "):
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
    assert checks.array_list((1, 2), 2, "out") == (1, 2)
    with pytest.raises(error, match="`out`"):
        checks.array_list(arrays, 2, "out")
