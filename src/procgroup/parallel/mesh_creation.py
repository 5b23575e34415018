"""A device mesh of all ranks, from its shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from procgroup.parallel.device_mesh import DeviceMesh
from procgroup.parallel.mesh_groups import read_overrides


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """Arrange ranks 0, 1, ... as an array of this shape, and make a group of this rank's row along each dimension.

    Every rank calls it; the default group is made when there is none. ``backend_override`` maps dimensions or
    their names to a backend's name, its options, or both as a tuple. Raises RuntimeError for names that are not one per
    dimension, for a device with an index and for a mesh of more ranks than there are.
    """
    if mesh_dim_names is not None:
        if len(set(mesh_dim_names)) != len(mesh_dim_names):
            raise RuntimeError(
                f"Each mesh_dim_name must be unique. Found repeated mesh_dim_name in mesh_dim_names {mesh_dim_names}"
            )
        if len(mesh_shape) != len(mesh_dim_names):
            raise RuntimeError(
                "mesh_shape and mesh_dim_names should have same length! "
                f"Found len(mesh_dim_names): {len(mesh_dim_names)} and len(mesh_shape):{len(mesh_shape)}."
            )
    overrides = read_overrides(backend_override, mesh_dim_names, len(mesh_shape))
    if device_type and not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. "
            "If you maintained a device object, it's recommended to pass in 'device.type'."
        )
    ranks = np.arange(np.prod(mesh_shape, dtype=np.int64)).reshape(mesh_shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=overrides)
