"""Trees of arrays: flattening them into leaves, and building the same tree of other leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Rebuild = Callable[[Iterator[Any]], Any]


@dataclass(frozen=True)
class _TreeNode:
    """One level of a tree: its children, how one writes them behind the tree's name, and what builds it of new ones."""

    names: Sequence[str]
    children: Sequence[Any]
    build: Callable[[list[Any]], Any]


def flatten(tree: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of a tree, in an order that its form alone decides, and what builds it again from new leaves.

    A dict's values come in the order of its sorted keys, which is the same on all ranks. None is a tree without leaves.
    """
    leaves: list[Any] = []
    rebuild = _walk(tree, leaves)
    return leaves, rebuild


def paths(tree: Any) -> list[str]:
    """Return where each leaf stands, in the order of ``flatten``: "['layers'][0].bias"; "" for a tree that is one."""
    node = _open(tree)
    if node is None:
        return [""]
    return [name + path for name, child in zip(node.names, node.children, strict=True) for path in paths(child)]


def _walk(tree: Any, leaves: list[Any]) -> Rebuild:
    node = _open(tree)
    if node is None:
        leaves.append(tree)
        return next
    parts = [_walk(child, leaves) for child in node.children]
    return lambda found: node.build([part(found) for part in parts])


def _open(tree: Any) -> _TreeNode | None:
    """Return the level below a tree; None for a leaf."""
    if tree is None:
        return _TreeNode((), (), lambda _: None)
    if isinstance(tree, dict):
        keys = sorted(tree, key=lambda key: (type(key).__name__, repr(key)))
        return _TreeNode(
            [f"[{key!r}]" for key in keys],
            [tree[key] for key in keys],
            lambda values: _like_dict(tree, dict(zip(keys, values, strict=True))),
        )
    if isinstance(tree, (list, tuple)):
        fields = getattr(tree, "_fields", None)
        names = [f".{field}" for field in fields] if fields else [f"[{index}]" for index in range(len(tree))]
        kind: Any = type(tree)
        return _TreeNode(names, tree, lambda values: kind(*values) if hasattr(tree, "_fields") else kind(values))
    return _known_to_jax(tree)


def _like_dict(tree: dict[Any, Any], values: dict[Any, Any]) -> Any:
    ordered = {key: values[key] for key in tree}
    return ordered if type(tree) is dict else type(tree)(ordered)


def _known_to_jax(tree: Any) -> _TreeNode | None:
    """Return the level below a node that was registered with JAX; None for leaves."""
    trees = getattr(sys.modules.get("jax"), "tree_util", None)  # None too while another thread imports JAX
    if trees is None or hasattr(tree, "dtype"):
        return None
    children, structure = trees.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if trees.treedef_is_leaf(structure):
        return None
    names = [trees.keystr(path) for path, _ in children]
    return _TreeNode(names, [child for _, child in children], structure.unflatten)
