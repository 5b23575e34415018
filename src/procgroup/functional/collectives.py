"""The functions themselves: flatten, fuse by dtype, call once per dtype, take apart.

All raise TypeError for a leaf that is no array, ValueError for a group that this rank is not in, because there is
nothing to return, and CollectiveMismatch on every rank when dtypes or sizes differ between the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from procgroup.api.membership import resolve
from procgroup.api.roots import root_or_first
from procgroup.errors import ArgumentError
from procgroup.functional.fusing import Bundle, Leaf, by_dtype
from procgroup.functional.trees import flatten
from procgroup.groups.group import ProcessGroup
from procgroup.types import AnyReduceOp, ReduceOp

_Call = Callable[[list[Leaf]], list[tuple[int, Any]]]


def all_reduce(tree: Any, op: AnyReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> Any:
    """Return each array combined, element by element, with those of the other ranks; bit-identical on all ranks."""
    chosen = resolve(group)

    def call(leaves: list[Leaf]) -> list[tuple[int, Any]]:
        bundle = Bundle(leaves, [leaf.seen.shape for leaf in leaves], 1).fill()
        chosen.all_reduce(bundle.array, op)
        return bundle.take(())

    return _for_each_dtype(tree, call)


def broadcast(
    tree: Any, src: int | None = None, group: ProcessGroup | None = None, group_src: int | None = None
) -> Any:
    """Return the arrays of rank ``src``, by default 0. The other ranks pass arrays of the same shapes and dtypes."""
    chosen = resolve(group)
    root = root_or_first(chosen, src, group_src)

    def call(leaves: list[Leaf]) -> list[tuple[int, Any]]:
        bundle = Bundle(leaves, [leaf.seen.shape for leaf in leaves], 1).fill()
        chosen.broadcast(bundle.array, root)
        return bundle.take(())

    return _for_each_dtype(tree, call)


def all_gather(tree: Any, group: ProcessGroup | None = None) -> Any:
    """Return, for each array, those of all ranks, stacked along a new first dimension in group-rank order."""
    chosen = resolve(group)

    def call(leaves: list[Leaf]) -> list[tuple[int, Any]]:
        shapes = [leaf.seen.shape for leaf in leaves]
        result = Bundle(leaves, shapes, chosen.size())
        chosen.all_gather_single(result.array, Bundle(leaves, shapes, 1).fill().array)
        return result.take((chosen.size(),))

    return _for_each_dtype(tree, call)


def reduce_scatter(tree: Any, op: AnyReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> Any:
    """Return, for each array, element ``[rank]`` of the ranks' combined arrays.

    The first dimension has one element per rank; the result does not have it. Raises ArgumentError for another length.
    """
    chosen = resolve(group)

    def call(leaves: list[Leaf]) -> list[tuple[int, Any]]:
        shapes = _shapes_per_rank(leaves, chosen.size(), "reduce_scatter")
        result = Bundle(leaves, shapes, 1)
        chosen.reduce_scatter_single(result.array, Bundle(leaves, shapes, chosen.size()).fill().array, op)
        return result.take(())

    return _for_each_dtype(tree, call)


def all_to_all(tree: Any, group: ProcessGroup | None = None) -> Any:
    """Return, for each array, in place ``[r]`` what rank ``r`` has in the place of this rank.

    The first dimension has one element per rank, also in the result. Raises ArgumentError for another length.
    """
    chosen = resolve(group)

    def call(leaves: list[Leaf]) -> list[tuple[int, Any]]:
        shapes = _shapes_per_rank(leaves, chosen.size(), "all_to_all")
        result = Bundle(leaves, shapes, chosen.size())
        given = Bundle(leaves, shapes, chosen.size()).fill()
        chosen.all_to_all_single(result.array, given.array)
        return result.take((chosen.size(),))

    return _for_each_dtype(tree, call)


def _for_each_dtype(tree: Any, call: _Call) -> Any:
    leaves, rebuild = flatten(tree)
    results: list[Any] = [None] * len(leaves)
    for group in by_dtype(leaves):
        for index, array in call(group):
            results[index] = array
    return rebuild(iter(results))


def _shapes_per_rank(leaves: Sequence[Leaf], size: int, op: str) -> list[tuple[int, ...]]:
    for leaf in leaves:
        if leaf.seen.shape[:1] != (size,):
            raise ArgumentError(
                f"functional.{op}: leaf {leaf.index} has shape {leaf.seen.shape}; expected a first dimension "
                f"of {size}, one element per rank."
            )
    return [leaf.seen.shape[1:] for leaf in leaves]
