"""Device meshes over ranks that are threads: groups, slices, flattening, errors; and the same as PyTorch's."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import procgroup as dist
import world
from procgroup.device_mesh import DeviceMesh, current_mesh, init_device_mesh
from procgroup.testing import run_ranks


def total_along(mesh: DeviceMesh, dimension: int | str | None = None) -> int:
    array = np.array([dist.get_rank()])
    dist.all_reduce(array, group=mesh.get_group(dimension))
    return int(array[0])


def test_each_dimension_has_a_group_of_this_ranks_row() -> None:
    def look() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rank = dist.get_rank()
        row, column = divmod(rank, 2)
        assert (mesh.ndim, mesh.shape, mesh.size(), mesh.size(1)) == (2, (2, 2), 4, 2)
        assert (mesh.device_type, mesh.mesh_dim_names) == ("cpu", ("dp", "tp"))
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert (mesh.get_rank(), mesh.get_coordinate()) == (rank, (row, column))
        assert (mesh.get_local_rank(0), mesh.get_local_rank("tp")) == (row, column)
        assert dist.get_process_group_ranks(mesh.get_group("tp")) == [2 * row, 2 * row + 1]
        assert dist.get_process_group_ranks(mesh.get_group(0)) == [column, column + 2]
        assert mesh.get_all_groups() == [mesh.get_group("dp"), mesh.get_group("tp")]
        assert total_along(mesh, "tp") == 4 * row + 1
        assert total_along(mesh, 0) == 2 * column + 2

    run_ranks(look, 4)


def test_a_mesh_of_all_ranks_uses_the_default_group() -> None:
    def look() -> None:
        mesh = init_device_mesh("cpu", (3,))
        assert mesh.get_group() is dist.group.WORLD
        assert mesh.get_local_rank() == dist.get_rank()

    run_ranks(look, 3)


@pytest.mark.filterwarnings("error")
def test_slices_and_flattened_meshes_use_the_groups_of_their_root() -> None:
    def look() -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        rank = dist.get_rank()
        row, column = divmod(rank, 2)
        assert mesh["dp", "cp", "tp"] is mesh
        assert mesh["tp"].get_group() is mesh.get_group("tp")
        assert mesh["tp"].mesh.tolist() == [2 * row, 2 * row + 1]
        assert mesh["dp", "tp"].mesh.tolist() == [[0, 1], [2, 3]]
        assert mesh["dp", "tp"]["tp"] == mesh["tp"]
        assert mesh["dp", "tp"].get_coordinate() == (row, column)
        flat = mesh["dp", "cp"]._flatten()
        assert (flat.mesh_dim_names, flat.mesh.tolist()) == (("dp_cp",), [column, column + 2])
        assert total_along(flat) == 2 * column + 2
        assert mesh["dp", "cp"]._flatten() is flat
        assert mesh.get_group("dp_cp") is flat.get_group()
        whole = mesh._flatten("all")
        assert whole.mesh.tolist() == [0, 1, 2, 3] and whole.get_group() is dist.group.WORLD
        assert flat._flatten() is flat
        before = mesh.get_group("tp")
        own = mesh["tp"]._flatten("own", backend_override="procgroup").get_group()
        assert own is not before and dist.get_process_group_ranks(own) == dist.get_process_group_ranks(before)
        with pytest.raises(UserWarning, match="Slicing a flattened dim"):
            mesh["dp_cp"]
        with pytest.raises(ValueError, match="already exists for submesh"):
            mesh["dp", "cp"]._flatten("tp")
        with pytest.raises(ValueError, match="has been created before"):
            mesh["cp", "tp"]._flatten("dp_cp")

    run_ranks(look, 4)


def test_ranks_outside_of_a_mesh_have_no_place_and_no_group() -> None:
    def look() -> None:
        mesh = DeviceMesh("cpu", [[3, 1]], mesh_dim_names=("a", "b"))
        assert mesh.mesh.tolist() == [[3, 1]]
        if dist.get_rank() in (1, 3):
            assert mesh.get_coordinate() == (0, 0 if dist.get_rank() == 3 else 1)
            # In the order of the mesh, so that place and group rank agree.
            assert dist.get_process_group_ranks(mesh.get_group("b")) == [3, 1]
            assert mesh.get_local_rank("b") == mesh.get_coordinate()[1]
            assert total_along(mesh, "b") == 4
        else:
            assert mesh.get_coordinate() is None
            with pytest.raises(RuntimeError, match=f"rank {dist.get_rank()} is not in DeviceMesh"):
                mesh.get_group("b")
            with pytest.raises(RuntimeError, match="needs to contain the local rank"):
                _ = DeviceMesh("cpu", [[3], [1]], mesh_dim_names=("a", "b"), _init_backend=False)["b"].mesh

    run_ranks(look, 4)


def test_equal_meshes_are_equal_and_hash_alike() -> None:
    def look() -> None:
        mesh, other = (init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")) for _ in range(2))
        assert mesh == other and hash(mesh) == hash(other)
        assert mesh["a"] == other["a"] and mesh["a"] != mesh["b"]
        assert mesh != init_device_mesh("cpu", (2, 1)) and mesh != 1
        assert mesh != init_device_mesh("meta", (2, 1), mesh_dim_names=("a", "b"))
        assert repr(mesh) == "DeviceMesh((a=2, b=1), 'cpu', stride=(1, ()))"
        assert repr(init_device_mesh("cpu", (2,))) == "DeviceMesh((2,), 'cpu', stride=(1,))"

    run_ranks(look, 2)


def test_a_mesh_is_current_inside_of_its_block() -> None:
    def look() -> None:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(RuntimeError, match="No device mesh is currently active!"):
            current_mesh()
        with mesh as entered, DeviceMesh("cpu", [0], _init_backend=False) as inner:
            assert entered is mesh and current_mesh() is inner
        with mesh:
            assert current_mesh() is mesh

    run_ranks(look, 2)


def test_a_mesh_is_made_from_groups_that_are_there() -> None:
    def look() -> None:
        group = dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("all",))
        assert mesh.mesh.tolist() == [0, 1] and mesh.get_group("all") is group
        alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        mesh = DeviceMesh.from_group([alone, group], "cpu", [[0, 1]], mesh_dim_names=("a", "b"))
        assert mesh.get_all_groups() == [alone, group]
        assert mesh["b"].get_group() is group
        for arguments, text in [
            ((group, "cpu", [1, 0]), "Invalid mesh"),
            (([], "cpu"), "at least one ProcessGroup"),
            (([group], "cpu"), "Must pass mesh if"),
            (([group], "cpu", [0, 1]), "Must pass mesh_dim_names"),
        ]:
            with pytest.raises(ValueError, match=text):
                DeviceMesh.from_group(*arguments)
        with pytest.raises(ValueError, match="ndim equal to number of ProcessGroups"):
            DeviceMesh.from_group([group], "cpu", [[0, 1]], mesh_dim_names=("a", "b"))

    run_ranks(look, 2)


def test_what_cannot_be_is_refused_in_torchs_words() -> None:
    def look() -> None:
        with pytest.raises(RuntimeError, match="not be bigger than default world size 2, but found 3 ranks!"):
            init_device_mesh("cpu", (3,))
        with pytest.raises(RuntimeError, match="Each mesh_dim_name must be unique"):
            init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "a"))
        with pytest.raises(RuntimeError, match="should have same length!"):
            init_device_mesh("cpu", (2,), mesh_dim_names=("a", "b"))
        with pytest.raises(RuntimeError, match="Device type with index is not supported but got cuda:0"):
            init_device_mesh("cuda:0", (2,))
        with pytest.raises(RuntimeError, match="invalid keys in backend_override"):
            init_device_mesh("cpu", (2,), backend_override={"x": "gloo"})
        with pytest.raises(RuntimeError, match="redundant dim index 0 and name a"):
            init_device_mesh("cpu", (2,), mesh_dim_names=("a",), backend_override={"a": "gloo", 0: "gloo"})
        with pytest.raises(RuntimeError, match="made of the ranks 0 to 1"):
            DeviceMesh("cpu", [0, 5])
        with pytest.raises(TypeError, match="mesh argument is required"):
            DeviceMesh("cpu")
        mesh = init_device_mesh("cpu", (1, 2), backend_override={1: "procgroup"})
        assert dist.get_backend(mesh.get_group(1)) == "procgroup"
        with pytest.raises(RuntimeError, match="Cannot slice a DeviceMesh without mesh_dim_names!"):
            mesh["a"]
        with pytest.raises(RuntimeError, match="Cannot flatten a DeviceMesh without"):
            mesh._flatten()
        with pytest.raises(KeyError, match="No `mesh_dim_names` found"):
            mesh.get_group("a")
        with pytest.raises(RuntimeError, match="`mesh_dim` needs to be specified"):
            mesh.get_group()
        with pytest.raises(RuntimeError, match="not initialized!"):
            DeviceMesh("cpu", [0, 1], _init_backend=False).get_group()
        named = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        with pytest.raises(KeyError, match="'c' does not exist"):
            named.get_group("c")
        with pytest.raises(KeyError, match="Valid mesh_dim_names are"):
            named["c"]
        with pytest.raises(KeyError, match="ascending order"):
            named["b", "a"]

    run_ranks(look, 2)


def test_a_mesh_makes_the_default_group_when_there_is_none() -> None:
    done = world.run(make_the_default_group, 2)
    assert done == [[[0, 1]], [[0, 1]]]


def make_the_default_group(rank: int, size: int) -> list[list[int]]:
    mesh = dist.init_device_mesh("cpu", (1, size))
    assert dist.is_initialized() and total_along(mesh, 1) == 1
    return mesh.mesh.tolist()  # type: ignore[no-any-return]


SHAPES: list[tuple[int, ...]] = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4), (1, 2, 2, 2)]

WITH_TORCH = """
import json, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh

rank = int(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
described = []
for shape, slices in json.loads(sys.argv[2]):
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple("abcd"[:len(shape)]))
    meshes = [mesh] + [mesh[tuple(names)] for names in slices]
    flat = [one._flatten("flat" + str(place)) for place, one in enumerate(meshes) if one.ndim > 1]
    described.append([
        [one.mesh.tolist(), list(one.get_coordinate()), list(one.shape), repr(one),
         [sorted(dist.get_process_group_ranks(group)) for group in one.get_all_groups()]]
        for one in meshes + flat
    ])
print(json.dumps(described))
"""


def described_by_us(work: list[Any]) -> list[Any]:
    described = []
    for shape, slices in work:
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple("abcd"[: len(shape)]))
        meshes = [mesh] + [mesh[tuple(names)] for names in slices]
        flat = [one._flatten(f"flat{place}") for place, one in enumerate(meshes) if one.ndim > 1]
        described.append(
            [
                [
                    one.mesh.tolist(),
                    list(one.get_coordinate() or ()),
                    list(one.shape),
                    repr(one),
                    [sorted(dist.get_process_group_ranks(group)) for group in one.get_all_groups()],
                ]
                for one in meshes + flat
            ]
        )
    return described


@pytest.mark.torch
def test_meshes_are_laid_out_as_pytorchs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    work = []
    for shape in SHAPES:
        names = "abcd"[: len(shape)]
        counts = range(1, len(shape))
        work.append([shape, [list(some) for count in counts for some in itertools.combinations(names, count)]])
    ours = run_ranks(described_by_us, 8, work, timeout=60)
    rank = 5
    command = [sys.executable, "-W", "ignore", "-c", WITH_TORCH, str(rank), json.dumps(work)]
    theirs = json.loads(world.run_command(command).stdout.splitlines()[-1])
    for shape, our, their in zip(SHAPES, ours[rank], theirs, strict=True):
        assert json.loads(json.dumps(our)) == their, shape
