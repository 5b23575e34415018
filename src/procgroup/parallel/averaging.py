"""Data-parallel training with any array library: all ranks begin with one rank's parameters, and step with the mean.

Both functions take a tree of arrays, as procgroup.functional does, leave it alone and return a new one.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from procgroup import types
from procgroup.errors import ArgumentError, CollectiveMismatch
from procgroup.functional.collectives import combine, copy
from procgroup.functional.fusing import Leaf, Leaves
from procgroup.functional.trees import paths
from procgroup.groups import checks, objects
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.group_choice import group_of
from procgroup.types import ReduceOp

T = TypeVar("T")


def average_gradients(tree: T, group: ProcessGroup | None = None) -> T:
    """Return the tree with the mean over the ranks of each of its arrays; the same bits on every rank.

    Each array keeps its library, shape and dtype. Raises TypeError for a leaf that is neither an array nor a number,
    ArgumentError for one of integers, bool or float8, and CollectiveMismatch on every rank, before a gradient is sent,
    when the trees differ.
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
    result: T = combine(leaves, ReduceOp.AVG, chosen)
    return result


def broadcast_parameters(tree: T, root: int = 0, group: ProcessGroup | None = None) -> T:
    """Return the tree with the arrays of group rank ``root``; the others' count for their shapes and dtypes only.

    Raises TypeError for a leaf that is neither an array nor a number, ValueError for a rank that the group does not
    have, and CollectiveMismatch on every rank, before a parameter is sent, when the trees or roots differ.
    """
    chosen = group_of(group)
    root = checks.group_rank(root, chosen.size(), chosen.group_name)
    leaves = _leaves(tree)
    _require_same_trees(leaves, chosen, "broadcast_parameters", f" from rank {root}")
    result: T = copy(leaves, root, chosen)
    return result


def _leaves(tree: Any) -> Leaves:
    return Leaves(tree, [path or "tree" for path in paths(tree)])


def _require_same_trees(leaves: Leaves, group: ProcessGroup, op: str, how: str = "") -> None:
    """Compare 64 bits of all ranks and, where these differ, everything: all ranks do so, or none does."""
    mine = [("call", f"{op}{how}"), *((str(leaf.name), _describe(leaf)) for leaf in leaves.all)]
    digest = blake2b(repr(mine).encode(), digest_size=8).digest()
    digests = np.empty(group.size(), np.uint64)
    group.all_gather_single(digests, np.frombuffer(digest, np.uint64))
    if (digests == digests[0]).all():
        return
    seconds = types.seconds(group.timeout)
    trees = [dict(tree) for tree in objects.all_gather(group, mine, seconds, safe=True)]
    raise CollectiveMismatch(
        calls=_first_difference(trees),
        op=op,
        sequence=0,
        group=group.group_name,
        rank=group.rank(),
        size=group.size(),
        members=group.members,
    )


def _describe(leaf: Leaf) -> str:
    return f"{leaf.seen.dtype} {leaf.seen.shape}"


def _first_difference(trees: list[dict[str, str]]) -> dict[int, str]:
    """Return, by rank, what each has where the ranks differ first."""
    for name in dict.fromkeys(name for tree in trees for name in tree):
        if len({tree.get(name) for tree in trees}) > 1:
            return {rank: f"{name} {tree[name]}" if name in tree else f"no {name}" for rank, tree in enumerate(trees)}
    return {rank: f"the leaves in the order {', '.join(tree)}" for rank, tree in enumerate(trees)}
