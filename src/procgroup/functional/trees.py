"""Trees of arrays: flattening them into leaves, and building the same tree of other leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Rebuild = Callable[[Iterator[Any]], Any]


def flatten(tree: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of a tree, in an order that its form alone decides, and what builds it again from new leaves.

    A dict's values come in the order of its sorted keys, which is the same on all ranks. None is a tree without leaves.
    """
    leaves: list[Any] = []
    rebuild = _walk(tree, leaves)
    return leaves, rebuild


def _walk(tree: Any, leaves: list[Any]) -> Rebuild:
    if tree is None:
        return lambda found: None
    if isinstance(tree, dict):
        keys = sorted(tree, key=lambda key: (type(key).__name__, repr(key)))
        parts = [_walk(tree[key], leaves) for key in keys]
        return lambda found: _like_dict(tree, dict(zip(keys, (part(found) for part in parts), strict=True)))
    if isinstance(tree, (list, tuple)):
        parts = [_walk(child, leaves) for child in tree]
        return lambda found: _like_sequence(tree, [part(found) for part in parts])
    children = _known_to_jax(tree)
    if children is not None:
        inner, structure = children
        parts = [_walk(child, leaves) for child in inner]
        return lambda found: structure.unflatten([part(found) for part in parts])
    leaves.append(tree)
    return lambda found: next(found)


def _like_dict(tree: dict[Any, Any], values: dict[Any, Any]) -> Any:
    ordered = {key: values[key] for key in tree}
    return ordered if type(tree) is dict else type(tree)(ordered)


def _like_sequence(tree: Sequence[Any], values: list[Any]) -> Any:
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)  # type: ignore[call-arg]


def _known_to_jax(tree: Any) -> tuple[list[Any], Any] | None:
    """Return the children and the structure of a node that was registered with JAX; None for leaves."""
    jax = sys.modules.get("jax")
    if jax is None or hasattr(tree, "dtype"):
        return None
    children, structure = jax.tree_util.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    return None if jax.tree_util.treedef_is_leaf(structure) else (children, structure)
