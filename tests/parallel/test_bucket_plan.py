"""How gradients are cut into buckets."""

from __future__ import annotations

import pytest

from procgroup.parallel.bucket_plan import Piece, plan_buckets


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
    assert plan_buckets([Piece(size, "float32") for size in sizes], order, limits) == expected


def test_kinds_are_kept_apart_and_buckets_come_in_the_order_of_their_last_piece() -> None:
    pieces = [Piece(4, kind) for kind in ("float32", "bfloat16", "float32", "bfloat16")]
    assert plan_buckets(pieces, [0, 1, 2, 3], [100]) == [[0, 2], [1, 3]]
    assert plan_buckets(pieces, [1, 0, 3, 2], [100]) == [[1, 3], [0, 2]]


def test_a_piece_that_is_alone_neither_joins_a_bucket_nor_closes_one() -> None:
    pieces = [Piece(4, "float32"), Piece(50, "float32", alone=True), Piece(4, "float32")]
    assert plan_buckets(pieces, [0, 1, 2], [8]) == [[1], [0, 2]]


def test_what_is_in_no_order_is_in_no_bucket() -> None:
    assert plan_buckets([Piece(4, "float32")] * 3, [2, 0], [4]) == [[2], [0]]
