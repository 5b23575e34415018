"""Several arrays of one dtype side by side in one: what goes through one call together.

A *bundle* has one or several *rows*, and in each row, one after the other, the same part of every array::

    rows 1:      [ a a a a | b b ]               all_reduce, broadcast, the input of all_gather
    rows size:   [ a0 | b0 ] [ a1 | b1 ] ...     one row for each rank, or from each rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from procgroup.arrays import making
from procgroup.arrays.array_view import HOST, ArrayView
from procgroup.arrays.view import view
from procgroup.functional import numbers
from procgroup.functional.trees import Rebuild, flatten, paths


@dataclass(frozen=True)
class Leaf:
    """One array or number of a tree: what it is, where it stands among the leaves, and what errors call it.

    ``library`` is the array's, or one of those that ``numbers`` has for numbers.
    """

    index: int
    name: str | LeafName
    library: str
    seen: ArrayView

    @property
    def is_integer(self) -> bool:
        """Whether it is a Python integer or bool, whose results are computed by Python."""
        return self.library == numbers.PYTHON and self.seen.dtype in ("int64", "bool")


class LeafName:
    """How one writes a leaf of a tree; found only when an error asks for it."""

    def __init__(self, tree: Any, index: int) -> None:
        self._tree = tree
        self._index = index

    def __str__(self) -> str:
        return f"tree{paths(self._tree)[self._index]}"


def _seen(array: Any, name: str | LeafName, library: str) -> ArrayView:
    on_devices = library == "torch"  # of other libraries' arrays on GPUs no bundle is made
    try:
        return view(array, on_devices=on_devices)
    except (TypeError, ValueError):
        return view(array, name=str(name), on_devices=on_devices)  # the same error, with the leaf's name


class Leaves:
    """The arrays and numbers of a tree, each looked at once. ``rebuild`` makes the same tree of new ones."""

    def __init__(self, tree: Any, names: Sequence[str] | None = None) -> None:
        """``names`` are what errors call the leaves, by default how one writes them: "tree['layers'][0]".

        Raises TypeError for a leaf that is neither an array nor a number.
        """
        self.rebuild: Rebuild
        values, self.rebuild = flatten(tree)
        self.all: list[Leaf] = []
        for index, value in enumerate(values):
            name = LeafName(tree, index) if names is None else names[index]
            library = numbers.kind_of(value)
            array = value if library is None else numbers.as_array(value, name)
            library = library or making.library_of(array)
            self.all.append(Leaf(index, name, library, _seen(array, name, library)))

    def by_dtype(self) -> list[list[Leaf]]:
        """Group the leaves by dtype and device, Python's integers apart from arrays.

        All ranks share the order of the groups: devices count in the order in which the tree has them.
        """
        devices = [HOST, *dict.fromkeys(leaf.seen.device for leaf in self.all if leaf.seen.device != HOST)]
        found: dict[tuple[str, bool, int], list[Leaf]] = {}
        for leaf in self.all:
            key = leaf.seen.dtype, leaf.is_integer, devices.index(leaf.seen.device)
            found.setdefault(key, []).append(leaf)
        return [found[key] for key in sorted(found)]


class FusedArrays:
    """The memory of several arrays of one dtype. ``array`` is all of it, as the collectives take it."""

    def __init__(self, leaves: Sequence[Leaf], shapes: Sequence[tuple[int, ...]], rows: int) -> None:
        """``shapes`` are those of one row's parts."""
        import numpy

        self._leaves = leaves
        self._shapes = shapes
        self._rows = rows
        self._dtype = leaves[0].seen.dtype
        self._itemsize = leaves[0].seen.itemsize
        self._width = sum(map(math.prod, shapes))
        self._memory = numpy.empty(rows * self._width * self._itemsize, numpy.uint8)
        # The library of the first leaf knows the dtype; NumPy alone may not.
        library = "torch" if leaves[0].library == "torch" else "numpy"
        self.array: Any = making.over(self._memory, (rows * self._width,), self._dtype, library)

    def fill(self) -> None:
        """Copy the leaves in; a leaf of several rows has them as its first dimension."""
        for leaf, part in zip(self._leaves, self._parts(), strict=True):
            part[...] = leaf.seen.elements().reshape(part.shape)

    def take(self, leading: tuple[int, ...]) -> list[tuple[int, Any]]:
        """Return new arrays of the leaves' libraries with their indices; ``leading`` comes before the parts' shapes."""
        found = []
        for leaf, part, shape in zip(self._leaves, self._parts(), self._shapes, strict=True):
            alone = len(self._leaves) == 1 or self._rows == 1
            memory = part.reshape(-1) if alone else part.copy().reshape(-1)
            library = "numpy" if leaf.library in numbers.KINDS else leaf.library
            array = making.over(memory, (*leading, *shape), self._dtype, library)
            found.append((leaf.index, numbers.as_given(array, leaf.library)))
        return found

    def host_bytes(self) -> Any:
        """Return all elements as bytes in the memory of the host."""
        return self._memory

    def copy_from(self, other: FusedArrays) -> None:
        """Copy all elements of a bundle that is as large."""
        self._memory[...] = other._memory

    def clear(self) -> None:
        """Set all elements to zero."""
        self._memory[...] = 0

    def _parts(self) -> list[Any]:
        elements = self._memory.view(f"V{self._itemsize}").reshape(self._rows, self._width)
        parts, begin = [], 0
        for shape in self._shapes:
            end = begin + math.prod(shape)
            parts.append(elements[:, begin:end])
            begin = end
        return parts


class GpuBundle(FusedArrays):
    """The same in the memory of a GPU, for torch's tensors: all is queued on the current stream."""

    def __init__(self, leaves: Sequence[Leaf], shapes: Sequence[tuple[int, ...]], rows: int) -> None:
        self._leaves = leaves
        self._shapes = shapes
        self._rows = rows
        self._width = sum(map(math.prod, shapes))
        self.array: Any = leaves[0].seen.owner.new_empty(rows * self._width)

    def fill(self) -> None:
        for leaf, part in zip(self._leaves, self._parts(), strict=True):
            part.copy_(leaf.seen.owner.detach().reshape(part.shape))

    def take(self, leading: tuple[int, ...]) -> list[tuple[int, Any]]:
        parts = zip(self._leaves, self._parts(), self._shapes, strict=True)
        return [(leaf.index, part.reshape((*leading, *shape))) for leaf, part, shape in parts]

    def host_bytes(self) -> Any:
        return view(self.array.cpu()).elements().tobytes()

    def copy_from(self, other: FusedArrays) -> None:
        self.array.copy_(other.array)

    def clear(self) -> None:
        self.array.zero_()

    def _parts(self) -> list[Any]:
        return list(self.array.view(self._rows, self._width).split(list(map(math.prod, self._shapes)), 1))


def make_bundle(leaves: Sequence[Leaf], shapes: Sequence[tuple[int, ...]], rows: int) -> FusedArrays:
    """Return the bundle of leaves of one dtype and device."""
    return (FusedArrays if leaves[0].seen.device == HOST else GpuBundle)(leaves, shapes, rows)
