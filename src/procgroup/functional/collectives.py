"""The functions themselves: flatten, fuse by dtype, check all, call once per dtype, take apart.

All raise TypeError for a leaf that is no array, ValueError for a group that this rank is not in, because there is
nothing to return, and CollectiveMismatch on every rank when dtypes or sizes differ between the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from procgroup.api.membership import resolve
from procgroup.api.roots import root_or_first
from procgroup.errors import ArgumentError
from procgroup.functional.fusing import Bundle, Leaf, Leaves
from procgroup.groups import checks
from procgroup.groups.group import ProcessGroup
from procgroup.types import AnyReduceOp, ReduceOp


@dataclass(frozen=True)
class _Call:
    """The call for the leaves of one dtype. ``result`` may be ``given`` itself; ``leading`` comes before its shapes."""

    verb: str
    arguments: tuple[Any, ...]
    given: Bundle
    result: Bundle
    leading: tuple[int, ...] = ()


def all_reduce(tree: Any, op: AnyReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> Any:
    """Return each array combined, element by element, with those of the other ranks; bit-identical on all ranks."""
    return combine(Leaves(tree), checks.reduce_op(op), resolve(group))


def broadcast(
    tree: Any, src: int | None = None, group: ProcessGroup | None = None, group_src: int | None = None
) -> Any:
    """Return the arrays of rank ``src``, by default 0. The other ranks pass arrays of the same shapes and dtypes."""
    chosen = resolve(group)
    return copy(Leaves(tree), root_or_first(chosen, src, group_src), chosen)


def combine(leaves: Leaves, op: AnyReduceOp, group: ProcessGroup) -> Any:
    """Return the tree of ``leaves`` with each array combined with those of the other ranks."""

    def prepare(same: list[Leaf]) -> _Call:
        bundle = Bundle(same, [leaf.seen.shape for leaf in same], 1)
        return _Call("all_reduce", (bundle.array, op), bundle, bundle)

    return _for_each_dtype(leaves, group, prepare)


def copy(leaves: Leaves, root: int, group: ProcessGroup) -> Any:
    """Return the tree of ``leaves`` with the arrays of group rank ``root``."""
    root = checks.group_rank(root, group.size(), group.group_name)

    def prepare(same: list[Leaf]) -> _Call:
        bundle = Bundle(same, [leaf.seen.shape for leaf in same], 1)
        return _Call("broadcast", (bundle.array, root), bundle, bundle)

    return _for_each_dtype(leaves, group, prepare)


def all_gather(tree: Any, group: ProcessGroup | None = None) -> Any:
    """Return, for each array, those of all ranks, stacked along a new first dimension in group-rank order."""
    chosen = resolve(group)

    def prepare(leaves: list[Leaf]) -> _Call:
        shapes = [leaf.seen.shape for leaf in leaves]
        given, result = Bundle(leaves, shapes, 1), Bundle(leaves, shapes, chosen.size())
        return _Call("all_gather_single", (result.array, given.array), given, result, (chosen.size(),))

    return _for_each_dtype(Leaves(tree), chosen, prepare)


def reduce_scatter(tree: Any, op: AnyReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> Any:
    """Return, for each array, element ``[rank]`` of the ranks' combined arrays.

    The first dimension has one element per rank; the result does not have it. Raises ArgumentError for another length.
    """
    chosen = resolve(group)
    op = checks.reduce_op(op)

    def prepare(leaves: list[Leaf]) -> _Call:
        shapes = _shapes_per_rank(leaves, chosen.size(), "reduce_scatter")
        given, result = Bundle(leaves, shapes, chosen.size()), Bundle(leaves, shapes, 1)
        return _Call("reduce_scatter_single", (result.array, given.array, op), given, result)

    return _for_each_dtype(Leaves(tree), chosen, prepare)


def all_to_all(tree: Any, group: ProcessGroup | None = None) -> Any:
    """Return, for each array, in place ``[r]`` what rank ``r`` has in the place of this rank.

    The first dimension has one element per rank, also in the result. Raises ArgumentError for another length.
    """
    chosen = resolve(group)

    def prepare(leaves: list[Leaf]) -> _Call:
        shapes = _shapes_per_rank(leaves, chosen.size(), "all_to_all")
        given, result = Bundle(leaves, shapes, chosen.size()), Bundle(leaves, shapes, chosen.size())
        return _Call("all_to_all_single", (result.array, given.array, None, None), given, result, (chosen.size(),))

    return _for_each_dtype(Leaves(tree), chosen, prepare)


def _for_each_dtype(leaves: Leaves, group: ProcessGroup, prepare: Callable[[list[Leaf]], _Call]) -> Any:
    """Make the calls once all are found good: where one is bad, no other rank has seen any of them."""
    calls = deque(prepare(same) for same in leaves.by_dtype())
    for call in calls if len(calls) > 1 else ():
        group.check_collective(call.verb, *call.arguments)
    results: list[Any] = [None] * len(leaves.all)
    while calls:  # what was given is let go before the next dtype's is copied
        call = calls.popleft()
        call.given.fill()
        getattr(group, call.verb)(*call.arguments)
        for index, array in call.result.take(call.leading):
            results[index] = array
    return leaves.rebuild(iter(results))


def _shapes_per_rank(leaves: Sequence[Leaf], size: int, op: str) -> list[tuple[int, ...]]:
    for leaf in leaves:
        if leaf.seen.shape[:1] != (size,):
            raise ArgumentError(
                f"functional.{op}: {leaf.name} has shape {leaf.seen.shape}; expected a first dimension "
                f"of {size}, one element per rank."
            )
    return [leaf.seen.shape[1:] for leaf in leaves]
