"""The arithmetic of meshes: an array of ranks, and which of its dimensions a mesh goes along.

A *root* is the array of all ranks of a mesh, n-dimensional. An *axis* is one dimension of a mesh: a tuple of dimensions
of the root, one of them or, where dimensions were flattened, several. A mesh that was sliced out of a root has
fewer axes; each rank is in the slice that holds it.
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
    """The axes of a mesh over an array of ranks."""

    root: Ranks
    axes: tuple[Axis, ...]

    @staticmethod
    def of(ranks: Any) -> MeshLayout:
        """Return the layout of an array of ranks. Raises ValueError when a rank is in it twice."""
        root = np.array(ranks, dtype=np.int64)
        if np.unique(root).size != root.size:
            raise ValueError(f"A rank can be at one place of a mesh only, got {root.tolist()}.")
        return MeshLayout(root, tuple((dimension,) for dimension in range(root.ndim)))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """How many ranks there are along each axis."""
        return tuple(prod(self.root.shape[dimension] for dimension in axis) for axis in self.axes)

    def ranks(self, rank: int) -> Ranks | None:
        """Return the mesh that holds a rank as an array; None when none does, unless there is one only."""
        meshes = self._meshes(self.axes)
        mine: list[Ranks] = [mesh for mesh in meshes if len(meshes) == 1 or (mesh == rank).any()]
        return mine[0] if mine else None

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return a rank's place in the mesh; None when it is not there."""
        mesh = self.ranks(rank)
        places = [] if mesh is None else np.argwhere(mesh == rank).tolist()
        return tuple(places[0]) if places else None

    def rows(self, axis: Axis) -> Iterator[list[int]]:
        """Give the ranks of every row along an axis: those that differ in nothing else."""
        yield from (mesh.tolist() for mesh in self._meshes((axis,)))

    def select(self, axes: Sequence[Axis]) -> MeshLayout:
        """Return the layout of a slice along some axes."""
        return MeshLayout(self.root, tuple(axes))

    def flat(self) -> Axis:
        """Return the axis that all axes make together."""
        return tuple(dimension for axis in self.axes for dimension in axis)

    def strides(self) -> tuple[int | tuple[int, ...], ...]:
        """Return by how many places in the flattened root one step along each axis goes; () where there is no step."""
        return tuple(steps[0] if len(steps) == 1 else steps for steps in map(self._steps, self.axes))

    def identity(self) -> tuple[Any, ...]:
        """Return what two equal layouts have in common."""
        return self.root.shape, tuple(self.root.reshape(-1).tolist()), self.axes

    def _steps(self, axis: Axis) -> tuple[int, ...]:
        long = [dimension for dimension in axis if self.root.shape[dimension] > 1]
        sizes = [self.root.shape[dimension] for dimension in long]
        strides = [prod(self.root.shape[dimension + 1 :]) for dimension in long]
        steps: list[int] = []
        for place, stride in enumerate(strides):
            # Dimensions of which one continues the other are one.
            if place + 1 == len(strides) or stride != strides[place + 1] * sizes[place + 1]:
                steps.append(stride)
        return tuple(steps)

    def _meshes(self, axes: tuple[Axis, ...]) -> Ranks:
        """Return the meshes along some axes, one for each place in the other dimensions."""
        selected = [dimension for axis in axes for dimension in axis]
        others = [dimension for dimension in range(self.root.ndim) if dimension not in selected]
        shape = [prod(self.root.shape[dimension] for dimension in axis) for axis in axes]
        return self.root.transpose(*others, *selected).reshape(-1, *shape) if self.root.ndim else self.root.reshape(1)


def select(known: Mapping[str, Axis], names: tuple[str, ...]) -> list[Axis]:
    """Return the axes of these names.

    Raises KeyError for an unknown name and for axes that do not ascend, RuntimeError for axes that overlap.
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
