"""The arithmetic of meshes: where each rank is, along which axes, and which ranks make a row."""

from __future__ import annotations

import numpy as np
import pytest

from procgroup.parallel.mesh.layout import MeshLayout, select

CUBE = MeshLayout.of(np.arange(24).reshape(2, 3, 4))


def test_a_root_holds_every_rank_at_its_place() -> None:
    assert CUBE.shape == (2, 3, 4)
    assert CUBE.coordinate(17) == (1, 1, 1)
    assert CUBE.coordinate(24) is None
    ranks = CUBE.ranks(99)
    assert ranks is not None and ranks.tolist() == np.arange(24).reshape(2, 3, 4).tolist()


def test_rows_differ_along_one_axis_only() -> None:
    assert list(CUBE.rows((2,)))[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(CUBE.rows((0,)))[:2] == [[0, 12], [1, 13]]
    assert list(CUBE.rows((0, 2)))[1] == [4, 5, 6, 7, 16, 17, 18, 19]
    for axis in [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]:
        rows = list(CUBE.rows(axis))
        assert sorted(rank for row in rows for rank in row) == list(range(24))


def test_a_slice_holds_the_ranks_that_share_the_other_coordinates() -> None:
    part = CUBE.select([(0,), (2,)])
    ranks = part.ranks(17)
    assert ranks is not None and ranks.tolist() == [[4, 5, 6, 7], [16, 17, 18, 19]]
    assert part.coordinate(17) == (1, 1)
    assert part.shape == (2, 4)
    assert part.ranks(99) is None


@pytest.mark.parametrize(
    ("axes", "strides"),
    [([(0,), (1,), (2,)], (12, 4, 1)), ([(0, 1), (2,)], (4, 1)), ([(0, 2)], ((12, 1),)), ([(0, 1, 2)], (1,))],
)
def test_strides_merge_where_dimensions_continue_each_other(
    axes: list[tuple[int, ...]], strides: tuple[object]
) -> None:
    assert CUBE.select(axes).strides() == strides


def test_a_rank_at_two_places_is_refused() -> None:
    with pytest.raises(ValueError, match="at one place of a mesh only"):
        MeshLayout.of([[0, 1], [1, 2]])


def test_selections_are_checked() -> None:
    known = {"dp": (0,), "cp": (1,), "tp": (2,), "dp_cp": (0, 1)}
    assert select(known, ("dp", "tp")) == [(0,), (2,)]
    assert select(known, ("dp_cp", "tp")) == [(0, 1), (2,)]
    with pytest.raises(KeyError, match="Valid mesh_dim_names are"):
        select(known, ("pp",))
    with pytest.raises(KeyError, match="ascending order"):
        select(known, ("tp", "dp"))
    with pytest.raises(RuntimeError, match="overlapping"):
        select(known, ("dp_cp", "cp"))
