"""Data-parallel training with any array library: broadcast the parameters once, average the gradients in each step.

These functions take a tree of arrays, as ``procgroup.functional`` does; those that change something return a new tree.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, TypeVar

from procgroup.arrays.array_view import HOST, ArrayView
from procgroup.errors import ArgumentError
from procgroup.functional.calls import perform
from procgroup.functional.fusing import Leaf, Leaves, make_bundle
from procgroup.functional.operations import AllReduce, Broadcast
from procgroup.functional.trees import paths
from procgroup.groups import checks
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.group_choice import group_of
from procgroup.parallel.rank_comparison import gather_if_different, mismatch
from procgroup.types import ReduceOp

T = TypeVar("T")

_HASH_BYTES = 8


def average_gradients(tree: T, group: ProcessGroup | None = None) -> T:
    """Return the tree with the mean over the ranks of each of its arrays; the same bits on every rank.

    Each array keeps its library, shape, dtype and device. Raises TypeError for a leaf that is neither an array nor a
    number, ArgumentError for integers, bool and float8, and CollectiveMismatch on every rank, before a gradient is
    sent, when the trees differ.
    """
    chosen = group_of(group)
    leaves = _leaves(tree)
    for leaf in leaves.all:
        if not leaf.seen.dtype.startswith(("float16", "float32", "float64", "bfloat16", "complex")):
            raise ArgumentError(
                f"average_gradients: {leaf.name} has dtype {leaf.seen.dtype}, which no gradient has; expected a "
                f"floating-point or complex dtype. Leave it out of the tree, or convert it."
            )
    _require_same_trees(leaves, chosen, "average_gradients")
    result: T = perform(leaves, AllReduce(ReduceOp.AVG), chosen)
    return result


def broadcast_parameters(tree: T, root: int = 0, group: ProcessGroup | None = None) -> T:
    """Return the tree with the arrays of group rank ``root``. On other ranks only shapes and dtypes of ``tree`` matter.

    Raises TypeError for a leaf that is neither an array nor a number, ValueError for a root outside of the group, and
    CollectiveMismatch on every rank, before a parameter is sent, when the trees or roots differ.
    """
    chosen = group_of(group)
    root = checks.group_rank(root, chosen.size(), chosen.group_name)
    leaves = _leaves(tree)
    _require_same_trees(leaves, chosen, "broadcast_parameters", f" from rank {root}")
    result: T = perform(leaves, Broadcast(root), chosen)
    return result


def require_equal_parameters(tree: Any, group: ProcessGroup | None = None) -> None:
    """Raise CollectiveMismatch on every rank, with the first array that differs, unless all ranks have the same bits.

    Each rank reads its arrays once and sends two hashes of 16 bytes, of their names and shapes and of their bits, so
    that a program can check its copies of the parameters now and then: they drift apart without an error where their
    gradients are not reduced. Raises TypeError for a leaf that is neither an array nor a number.
    """
    chosen = group_of(group)
    leaves = _leaves(tree)
    _require_same_trees(leaves, chosen, "require_equal_parameters")
    hashes = gather_if_different(chosen, [(str(leaf.name), _hash(leaf)) for leaf in leaves.all])
    if hashes is not None:
        held = _first_difference([{name: f"with hash {found}" for name, found in each} for each in hashes])
        advice = (
            "Reduce the gradients before each update, as average_gradients does, and begin with broadcast_parameters."
        )
        raise mismatch(chosen, "require_equal_parameters", held, differing="parameters", advice=advice)


def _hash(leaf: Leaf) -> str:
    bundle = make_bundle([leaf], [leaf.seen.shape], 1)
    bundle.fill()
    return blake2b(bundle.host_bytes(), digest_size=_HASH_BYTES).hexdigest()


def _leaves(tree: Any) -> Leaves:
    return Leaves(tree, [path or "tree" for path in paths(tree)])


def _require_same_trees(leaves: Leaves, group: ProcessGroup, op: str, arguments: str = "") -> None:
    described = [(str(leaf.name), _described(leaf.seen)) for leaf in leaves.all]
    trees = gather_if_different(group, [("call", f"{op}{arguments}"), *described])
    if trees is not None:
        held = _first_difference([dict(tree) for tree in trees])
        advice = "Pass the same structure, shapes and dtypes on every rank; nothing was sent."
        raise mismatch(group, op, held, differing="trees", advice=advice)


def _described(seen: ArrayView) -> str:
    return f"{seen.dtype} {seen.shape}{'' if seen.device == HOST else ' on a GPU'}"


def _first_difference(trees: list[dict[str, str]]) -> dict[int, str]:
    """Return the first differing entry of each rank."""
    for name in dict.fromkeys(name for tree in trees for name in tree):
        if len({tree.get(name) for tree in trees}) > 1:
            return {rank: f"{name} {tree[name]}" if name in tree else f"no {name}" for rank, tree in enumerate(trees)}
    return {rank: f"the leaves in the order {', '.join(tree)}" for rank, tree in enumerate(trees)}
