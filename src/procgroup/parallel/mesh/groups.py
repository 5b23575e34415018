"""Create the process groups of a device mesh: all ranks create those of each axis in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from procgroup.api.default_group import is_foreign, resolve
from procgroup.api.groups import new_group
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.mesh.layout import Axis, MeshLayout

Override = tuple[str | None, Any]
"""A backend's name and its options."""

NO_OVERRIDE: Override = (None, None)
"""The backend of the default group."""


def make_group(layout: MeshLayout, axis: Axis, name: str, override: Override) -> ProcessGroup | None:
    """Create the groups along an axis; return the group of this rank, or None if it is not in the mesh.

    For an axis of all ranks in ascending order, return the default group.
    """
    world = resolve(None)
    rows = list(layout.rows(axis))
    if rows == [list(world.members)] and override == NO_OVERRIDE:
        return world
    backend, options = override
    own: ProcessGroup | None = None
    for row in rows:
        made: Any = new_group(row, backend=backend, pg_options=options, group_desc=f"mesh_{name}", sort_ranks=False)
        if not is_foreign(made):
            own = made
    return own


def read_overrides(given: Mapping[Any, Any] | None, names: Sequence[str] | None, count: int) -> tuple[Override, ...]:
    """Return the override of each dimension from ``backend_override``, whose keys are dimensions or their names.

    Raises RuntimeError for any other key, and for a dimension that is given by its number and its name.
    """
    rest = dict(given or {})
    overrides = []
    for dimension in range(count):
        keys = [key for key in (dimension, *(names or ())[dimension : dimension + 1]) if key in rest]
        if len(keys) == 2:
            raise RuntimeError(f"Found redundant dim index {keys[0]} and name {keys[1]} in backend_override")
        overrides.append(read_override(rest.pop(keys[0])) if keys else NO_OVERRIDE)
    if rest:
        raise RuntimeError(
            f"Found invalid keys in backend_override: got {list(rest)}, expected integers in range [0, {count}) "
            f"or one of {tuple(names or ())}"
        )
    return tuple(overrides)


def read_override(value: Any) -> Override:
    """Return an override from a backend's name, its options, a tuple of both, or None."""
    if isinstance(value, str):
        return value, None
    if isinstance(value, tuple) and len(value) == 2:
        return value
    return None, value
