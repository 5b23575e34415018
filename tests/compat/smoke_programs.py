"""All smoke programs, by the name that they show."""

from __future__ import annotations

from compat import smoke_collectives, smoke_groups, smoke_meshes, smoke_objects, smoke_stores, smoke_world
from compat.registry import SMOKE

__all__ = ["SMOKE", "smoke_collectives", "smoke_groups", "smoke_meshes", "smoke_objects", "smoke_stores", "smoke_world"]
