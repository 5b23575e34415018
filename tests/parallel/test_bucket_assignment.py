"""The assignment of gradients to buckets."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from procgroup.parallel.ddp.bucket_assignment import GradientInfo, assign_to_buckets


@pytest.mark.parametrize(
    ("sizes", "order", "limits", "expected"),
    [
        ([], [], [10], []),
        ([5], [0], [10], [[0]]),
        ([5, 5, 5], [2, 1, 0], [10], [[2, 1], [0]]),
        ([4, 4, 4, 4], [0, 1, 2, 3], [4, 8], [[0], [1, 2], [3]]),
        ([100, 1], [0, 1], [10], [[0], [1]]),
        ([0, 0, 3], [0, 1, 2], [3], [[0, 1, 2]]),
    ],
)
def test_a_bucket_is_closed_when_it_is_full(
    sizes: list[int], order: list[int], limits: list[int], expected: list[list[int]]
) -> None:
    assert assign_to_buckets([GradientInfo(size, "float32") for size in sizes], order, limits) == expected


def test_kinds_have_separate_buckets_which_are_sorted_by_their_last_gradient() -> None:
    gradients = [GradientInfo(4, kind) for kind in ("float32", "bfloat16", "float32", "bfloat16")]
    assert assign_to_buckets(gradients, [0, 1, 2, 3], [100]) == [[0, 2], [1, 3]]
    assert assign_to_buckets(gradients, [1, 0, 3, 2], [100]) == [[1, 3], [0, 2]]


def test_a_single_gradient_neither_joins_a_bucket_nor_closes_one() -> None:
    gradients = [GradientInfo(4, "float32"), GradientInfo(50, "float32", is_single=True), GradientInfo(4, "float32")]
    assert assign_to_buckets(gradients, [0, 1, 2], [8]) == [[1], [0, 2]]


def test_a_gradient_that_is_not_in_the_order_is_in_no_bucket() -> None:
    assert assign_to_buckets([GradientInfo(4, "float32")] * 3, [2, 0], [4]) == [[2], [0]]
