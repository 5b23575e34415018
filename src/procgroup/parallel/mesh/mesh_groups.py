"""The process groups of a mesh: one for this rank along each axis, made by all ranks in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from procgroup.api.groups import new_group
from procgroup.api.membership import is_foreign, resolve
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.mesh.mesh_layout import Axis, MeshLayout

Override = tuple[str | None, Any]
"""A backend's name and its options, both None for the default group's."""

KEPT: Override = (None, None)


def make_group(layout: MeshLayout, axis: Axis, name: str, override: Override) -> ProcessGroup | None:
    """Make the groups along an axis; return the one of this rank, or None when it is not in the mesh.

    Where an axis holds all ranks in their order, the default group serves.
    """
    world = resolve(None)
    rows = list(layout.rows(axis))
    if rows == [list(world.members)] and override == KEPT:
        return world
    backend, options = override
    mine: ProcessGroup | None = None
    for row in rows:
        made: Any = new_group(row, backend=backend, pg_options=options, group_desc=f"mesh_{name}", sort_ranks=False)
        if not is_foreign(made):
            mine = made
    return mine


def read_overrides(given: Mapping[Any, Any] | None, names: Sequence[str] | None, count: int) -> tuple[Override, ...]:
    """Return one override per dimension of ``backend_override``, whose keys are dimensions or their names.

    Raises RuntimeError for a key that is neither, and when a dimension is there under both.
    """
    left = dict(given or {})
    overrides = []
    for dimension in range(count):
        keys = [key for key in (dimension, *(names or ())[dimension : dimension + 1]) if key in left]
        if len(keys) == 2:
            raise RuntimeError(f"Found redundant dim index {keys[0]} and name {keys[1]} in backend_override")
        overrides.append(read_override(left.pop(keys[0])) if keys else KEPT)
    if left:
        raise RuntimeError(
            f"Found invalid keys in backend_override: got {list(left)}, expected integers in range [0, {count}) "
            f"or one of {tuple(names or ())}"
        )
    return tuple(overrides)


def read_override(value: Any) -> Override:
    """Return a backend's name, its options, a tuple of both, or None, as the tuple."""
    if isinstance(value, str):
        return value, None
    if isinstance(value, tuple) and len(value) == 2:
        return value
    return None, value
