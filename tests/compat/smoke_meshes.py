"""Smoke programs of device meshes, on two ranks."""

from __future__ import annotations

from compat.registry import shows

import procgroup as dist


@shows("init_device_mesh")
def init_device_mesh() -> None:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.get_coordinate() == (0, dist.get_rank())
    assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [0, 1]
    assert dist.get_process_group_ranks(mesh.get_group("dp")) == [dist.get_rank()]


@shows("DeviceMesh")
def device_mesh() -> None:
    mesh = dist.DeviceMesh("cpu", [1, 0])
    assert mesh.shape == (2,)
    assert mesh.get_local_rank() == 1 - dist.get_rank()


@shows(
    "DeviceMesh.device_type",
    "DeviceMesh.get_all_groups",
    "DeviceMesh.get_coordinate",
    "DeviceMesh.get_group",
    "DeviceMesh.get_local_rank",
    "DeviceMesh.get_rank",
    "DeviceMesh.mesh",
    "DeviceMesh.mesh_dim_names",
    "DeviceMesh.ndim",
    "DeviceMesh.shape",
    "DeviceMesh.size",
)
def members_of_a_mesh() -> None:
    mesh = dist.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("outer", "inner"))
    rank = dist.get_rank()
    assert (mesh.device_type, mesh.mesh_dim_names, mesh.ndim) == ("cpu", ("outer", "inner"), 2)
    assert (mesh.shape, mesh.size(), mesh.size(1)) == ((1, 2), 2, 2)
    assert mesh.mesh.tolist() == [[0, 1]]
    assert (mesh.get_rank(), mesh.get_coordinate(), mesh.get_local_rank(1)) == (rank, (0, rank), rank)
    assert [group.size() for group in mesh.get_all_groups()] == [1, 2]
    assert dist.get_process_group_ranks(mesh.get_group("inner")) == [0, 1]


@shows("DeviceMesh.from_group")
def mesh_from_group() -> None:
    assert dist.group.WORLD is not None
    mesh = dist.DeviceMesh.from_group(dist.group.WORLD, "cpu")
    assert mesh.get_group() is dist.group.WORLD
