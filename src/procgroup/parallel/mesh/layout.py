"""The arithmetic of device meshes: coordinates, rows, slices and flattened dimensions of an array of ranks.

The *root* is the n-dimensional array of all ranks of a mesh. An *axis* is one dimension of a mesh, given as a tuple of
dimensions of the root: one, or several for a flattened dimension. A slice of a mesh has fewer axes than the root; it
consists of several arrays, and each rank belongs to the array that contains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

Ranks = np.ndarray[Any, np.dtype[np.int64]]
Axis = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MeshLayout:
    """An array of ranks, and the axes of a mesh in it."""

    root: Ranks
    axes: tuple[Axis, ...]

    @staticmethod
    def of(ranks: Any) -> MeshLayout:
        """Return the layout of an array of ranks. Raises ValueError for a rank that occurs twice."""
        root = np.array(ranks, dtype=np.int64)
        if np.unique(root).size != root.size:
            raise ValueError(f"A rank can be at one place of a mesh only, got {root.tolist()}.")
        return MeshLayout(root, tuple((dimension,) for dimension in range(root.ndim)))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return tuple(prod(self.root.shape[dimension] for dimension in axis) for axis in self.axes)

    def ranks(self, rank: int) -> Ranks | None:
        """Return the array that contains a rank, or the only array; None if none of several arrays contains it."""
        arrays = self._arrays(self.axes)
        own: list[Ranks] = [array for array in arrays if len(arrays) == 1 or (array == rank).any()]
        return own[0] if own else None

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return a rank's coordinate in the mesh; None for a rank outside of it."""
        array = self.ranks(rank)
        found = [] if array is None else np.argwhere(array == rank).tolist()
        return tuple(found[0]) if found else None

    def rows(self, axis: Axis) -> Iterator[list[int]]:
        """Yield the ranks of every row along an axis: the ranks whose other coordinates are equal."""
        yield from (array.tolist() for array in self._arrays((axis,)))

    def select(self, axes: Sequence[Axis]) -> MeshLayout:
        """Return the layout of a slice along some axes."""
        return MeshLayout(self.root, tuple(axes))

    def flat(self) -> Axis:
        """Return the flattened axis of all axes."""
        return tuple(dimension for axis in self.axes for dimension in axis)

    def strides(self) -> tuple[int | tuple[int, ...], ...]:
        """Return the stride of each axis in the flattened root: one number, several, or () for an axis of one rank."""
        return tuple(steps[0] if len(steps) == 1 else steps for steps in map(self._steps, self.axes))

    def identity(self) -> tuple[Any, ...]:
        """Return a key that is equal for equal layouts."""
        return self.root.shape, tuple(self.root.reshape(-1).tolist()), self.axes

    def _steps(self, axis: Axis) -> tuple[int, ...]:
        long = [dimension for dimension in axis if self.root.shape[dimension] > 1]
        sizes = [self.root.shape[dimension] for dimension in long]
        strides = [prod(self.root.shape[dimension + 1 :]) for dimension in long]
        steps: list[int] = []
        for index, stride in enumerate(strides):
            # Two dimensions with contiguous memory count as one.
            if index + 1 == len(strides) or stride != strides[index + 1] * sizes[index + 1]:
                steps.append(stride)
        return tuple(steps)

    def _arrays(self, axes: tuple[Axis, ...]) -> Ranks:
        """Return the arrays along some axes, one for each coordinate in the other dimensions."""
        selected = [dimension for axis in axes for dimension in axis]
        others = [dimension for dimension in range(self.root.ndim) if dimension not in selected]
        shape = [prod(self.root.shape[dimension] for dimension in axis) for axis in axes]
        return self.root.transpose(*others, *selected).reshape(-1, *shape) if self.root.ndim else self.root.reshape(1)


def select(known: Mapping[str, Axis], names: tuple[str, ...]) -> list[Axis]:
    """Return the axes with these names.

    Raises KeyError for an unknown name and for axes in descending order, RuntimeError for overlapping axes.
    """
    if not all(name in known for name in names):
        raise KeyError(f"Invalid mesh_dim_names {names} specified. Valid mesh_dim_names are {[*known]}.")
    axes = [known[name] for name in names]
    order = [dimension for axis in axes for dimension in axis]
    if order != sorted(order):
        raise KeyError(f"Invalid mesh_dim_names {names} specified. Mesh dim indices should be in ascending order.")
    if len(set(order)) != len(order):
        raise RuntimeError(f"Slicing overlapping dim_names {names} is not allowed.")
    return axes
