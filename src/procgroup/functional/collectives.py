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
from procgroup.functional.fusing import Bundle, Leaf, by_dtype
from procgroup.functional.trees import flatten
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
    chosen = resolve(group)
    op = checks.reduce_op(op)

    def prepare(leaves: list[Leaf]) -> _Call:
        bundle = Bundle(leaves, [leaf.seen.shape for leaf in leaves], 1)
        return _Call("all_reduce", (bundle.array, op), bundle, bundle)

    return _for_each_dtype(tree, chosen, prepare)


def broadcast(
    tree: Any, src: int | None = None, group: ProcessGroup | None = None, group_src: int | None = None
) -> Any:
    """Return the arrays of rank ``src``, by default 0. The other ranks pass arrays of the same shapes and dtypes."""
    chosen = resolve(group)
    root = checks.group_rank(root_or_first(chosen, src, group_src), chosen.size(), chosen.group_name)

    def prepare(leaves: list[Leaf]) -> _Call:
        bundle = Bundle(leaves, [leaf.seen.shape for leaf in leaves], 1)
        return _Call("broadcast", (bundle.array, root), bundle, bundle)

    return _for_each_dtype(tree, chosen, prepare)


def all_gather(tree: Any, group: ProcessGroup | None = None) -> Any:
    """Return, for each array, those of all ranks, stacked along a new first dimension in group-rank order."""
    chosen = resolve(group)

    def prepare(leaves: list[Leaf]) -> _Call:
        shapes = [leaf.seen.shape for leaf in leaves]
        given, result = Bundle(leaves, shapes, 1), Bundle(leaves, shapes, chosen.size())
        return _Call("all_gather_single", (result.array, given.array), given, result, (chosen.size(),))

    return _for_each_dtype(tree, chosen, prepare)


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

    return _for_each_dtype(tree, chosen, prepare)


def all_to_all(tree: Any, group: ProcessGroup | None = None) -> Any:
    """Return, for each array, in place ``[r]`` what rank ``r`` has in the place of this rank.

    The first dimension has one element per rank, also in the result. Raises ArgumentError for another length.
    """
    chosen = resolve(group)

    def prepare(leaves: list[Leaf]) -> _Call:
        shapes = _shapes_per_rank(leaves, chosen.size(), "all_to_all")
        given, result = Bundle(leaves, shapes, chosen.size()), Bundle(leaves, shapes, chosen.size())
        return _Call("all_to_all_single", (result.array, given.array, None, None), given, result, (chosen.size(),))

    return _for_each_dtype(tree, chosen, prepare)


def _for_each_dtype(tree: Any, group: ProcessGroup, prepare: Callable[[list[Leaf]], _Call]) -> Any:
    """Make the calls once all are found good: where one is bad, no other rank has seen any of them."""
    leaves, rebuild = flatten(tree)
    calls = deque(prepare(same) for same in by_dtype(leaves))
    for call in calls if len(calls) > 1 else ():
        group.check_collective(call.verb, *call.arguments)
    results: list[Any] = [None] * len(leaves)
    while calls:  # what was given is let go before the next dtype's is copied
        call = calls.popleft()
        call.given.fill()
        getattr(group, call.verb)(*call.arguments)
        for index, array in call.result.take(call.leading):
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
