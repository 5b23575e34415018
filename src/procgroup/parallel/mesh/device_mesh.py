"""DeviceMesh: the ranks as an n-dimensional array, with a process group along each dimension."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from procgroup.api.default_group import is_foreign, resolve
from procgroup.api.groups import new_group
from procgroup.api.lifecycle import init_process_group, is_initialized
from procgroup.api.ranks import get_process_group_ranks, get_rank, get_world_size
from procgroup.groups.group import ProcessGroup
from procgroup.parallel.mesh.layout import Axis, MeshLayout, Ranks, select
from procgroup.process import environ

Override = tuple[str | None, Any]
"""A backend's name and its options."""

NO_OVERRIDE: Override = (None, None)
"""The backend of the default group."""

_entered: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("procgroup_meshes", default=())


def current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost ``with`` block. Raises RuntimeError outside of such a block."""
    if not _entered.get():
        raise RuntimeError("No device mesh is currently active!")
    return _entered.get()[-1]


class DeviceMesh:
    """The ranks as an n-dimensional array, with a process group of this rank's row along each dimension.

    ``mesh`` is an array of distinct global ranks. Every rank of the default group creates it, including ranks outside
    of the mesh. Groups have the order of the mesh: a rank's coordinate along a dimension is its rank in that group,
    also when the ranks are not in ascending order (torch.distributed sorts them).
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
        backend_override: Sequence[Override] | None = None,
        _init_backend: bool = True,
    ) -> None:
        """Create the groups along all dimensions. TypeError without a mesh, ValueError for a rank that occurs twice."""
        if mesh is None:
            raise TypeError("The mesh argument is required: an array of global ranks.")
        layout = MeshLayout.of(mesh)
        overrides = [NO_OVERRIDE] * len(layout.axes) if backend_override is None else list(backend_override)
        if len(overrides) != len(layout.axes):
            raise ValueError(
                "backend_override should have the same length as the number of mesh dimensions, "
                f"but got {len(overrides)} and {len(layout.axes)}."
            )
        self._initialize(device_type, layout, tuple(mesh_dim_names) if mesh_dim_names else None, None)
        if not _init_backend:
            return
        _require_ranks(layout)
        for dimension, (axis, override) in enumerate(zip(layout.axes, overrides, strict=True)):
            name = self._names[dimension] if self._names else f"dim_{dimension}"
            self._groups[axis] = _make_group(layout, axis, name, override)

    def _initialize(
        self, device_type: str, layout: MeshLayout, names: tuple[str, ...] | None, root: DeviceMesh | None
    ) -> None:
        self._device_type = device_type
        self._layout = layout
        self._names = names
        self._root = self if root is None else root
        # Used in a root only: groups by axis (None on a rank outside of the mesh), and flattened meshes by name.
        self._groups: dict[Axis, ProcessGroup | None] = {}
        self._flattened: dict[str, DeviceMesh] = {}

    @property
    def device_type(self) -> str:
        """The type of device, such as "cpu"."""
        return self._device_type

    @property
    def mesh(self) -> Ranks:
        """The array of ranks that contains this rank. Raises RuntimeError for a slice without this rank."""
        ranks = self._layout.ranks(_own_rank())
        if ranks is None:
            raise RuntimeError(
                "In order to get the mesh of a DeviceMesh it needs to either have all its original dimensions "
                "(e.g., no slicing) or it needs to contain the local rank"
            )
        return ranks.copy()

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the dimensions."""
        return self._names

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._layout.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return self._layout.shape

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks, in total or along a dimension."""
        return int(np.prod(self.shape)) if mesh_dim is None else self.shape[mesh_dim]

    def get_rank(self) -> int:
        """Return this process's global rank."""
        return get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinate in the mesh; None for a rank outside of it."""
        return self._layout.coordinate(_own_rank())

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's coordinate along a dimension, which is optional in a mesh of one dimension.

        Raises RuntimeError without a dimension in a mesh of several, and for a rank outside of the mesh.
        """
        return self.get_group(mesh_dim).rank()

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the group along a dimension, which is optional in a mesh of one dimension.

        Raises RuntimeError without a dimension in a mesh of several, for a rank outside of the mesh and for a mesh
        that was created without groups; KeyError for an unknown name.
        """
        groups = self._root._groups
        if not groups:
            raise RuntimeError("DeviceMesh process groups not initialized!")
        if mesh_dim is None:
            if self.ndim > 1:
                raise RuntimeError(
                    f"Found the DeviceMesh have {self.ndim} dimensions",
                    "Optional kwarg `mesh_dim` needs to be specified when device_mesh.ndim > 1.",
                    "If you want to get the list of all the ProcessGroups in the DeviceMesh,"
                    "please use `get_all_groups()` instead.",
                )
            mesh_dim = 0
        found = groups.get(self._axis(mesh_dim))
        if found is None:
            raise RuntimeError(f"Global rank {get_rank()} is not in {self!r} and has no group of it.")
        return found

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the groups along all dimensions."""
        return [self.get_group(dimension) for dimension in range(self.ndim)]

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the slice along the named dimensions that contains this rank, with the existing groups.

        The name of a flattened mesh is valid as a dimension of its root. Raises RuntimeError for a mesh without names
        and for overlapping dimensions, KeyError for unknown names and for names in another order than the mesh's.
        """
        if self._names is None:
            raise RuntimeError("Cannot slice a DeviceMesh without mesh_dim_names!")
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if names == self._names:
            return self
        flattened = self._flattened if self is self._root else {}
        if any(name in flattened and name not in self._names for name in names):
            warnings.warn(
                "Slicing a flattened dim from root mesh will be deprecated in PT 2.11. "
                "Users need to bookkeep the flattened mesh directly. ",
                stacklevel=2,
            )
        known = {name: mesh._layout.axes[0] for name, mesh in flattened.items()}
        known.update(zip(self._names, self._layout.axes, strict=True))
        return self._derive(select(known, names), names)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """Return a mesh of one dimension with all ranks of this one. The default name is the names joined by "_".

        The first call is collective: every rank of the default group calls it. Later calls return the same mesh by its
        name. Raises RuntimeError for a mesh without names, ValueError for a name that is in use.
        """
        if self._names is None:
            raise RuntimeError("Cannot flatten a DeviceMesh without mesh_dim_names!")
        name = mesh_dim_name or "_".join(self._names)
        if self.ndim == 1 and name in self._names:
            return self
        root = self._root
        if name in (root._names or ()):
            raise ValueError(
                f"{name} already exists for submesh of the {root!r}. The mesh_dim_names of submesh and flattened mesh "
                f"are {root._names}. Please specify another valid mesh_dim_name."
            )
        axis = self._layout.flat()
        if name in root._flattened:
            if root._flattened[name]._layout.axes == (axis,):
                return root._flattened[name]
            raise ValueError(
                f"Flatten mesh with mesh_dim_name {name} has been created before, "
                "Please specify another valid mesh_dim_name."
            )
        override = _read_override(backend_override)
        if axis not in root._groups or override != NO_OVERRIDE:
            root._groups[axis] = _make_group(root._layout, axis, name, override)
        root._flattened[name] = self._derive([axis], (name,))
        return root._flattened[name]

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
    ) -> DeviceMesh:
        """Return a mesh with existing groups: one group, or one per dimension of ``mesh``, with ``mesh_dim_names``.

        Raises ValueError when the mesh does not fit the groups.
        """
        if isinstance(group, ProcessGroup):
            ranks = get_process_group_ranks(group)
            if mesh is not None and np.asarray(mesh).tolist() != ranks:
                raise ValueError(f"Invalid mesh {mesh} for ProcessGroup with ranks {ranks}")
            mesh, groups = ranks, [group]
        else:
            groups = list(group)
            if not groups:
                raise ValueError("Expects at least one ProcessGroup to be passed")
            if mesh is None:
                raise ValueError("Must pass mesh if passing multiple ProcessGroups")
            if mesh_dim_names is None:
                raise ValueError("Must pass mesh_dim_names if passing multiple ProcessGroups")
            if np.ndim(mesh) != len(groups):
                raise ValueError(
                    "Expects mesh with ndim equal to number of ProcessGroups but got "
                    f"mesh {np.asarray(mesh).tolist()} and {len(groups)} ProcessGroups"
                )
        made = DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names, _init_backend=False)
        made._groups.update(zip(made._layout.axes, groups, strict=True))
        return made

    def _derive(self, axes: Sequence[Axis], names: tuple[str, ...]) -> DeviceMesh:
        derived = DeviceMesh.__new__(DeviceMesh)
        derived._initialize(self._device_type, self._layout.select(axes), names, self._root)
        return derived

    def _axis(self, mesh_dim: int | str) -> Axis:
        if not isinstance(mesh_dim, str):
            return self._layout.axes[mesh_dim]
        if mesh_dim in self._root._flattened:
            return self._root._flattened[mesh_dim]._layout.axes[0]
        if not self._names:
            raise KeyError("No `mesh_dim_names` found.")
        if mesh_dim not in self._names:
            raise KeyError(
                f"Mesh dimension '{mesh_dim}' does not exist.",
                f"Available mesh dimensions are: mesh_dim_names={self._names}",
            )
        return self._layout.axes[self._names.index(mesh_dim)]

    def __enter__(self) -> DeviceMesh:
        """Make this the current mesh within the block."""
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _entered.set(_entered.get()[:-1])

    def _identity(self) -> tuple[Any, ...]:
        return self._layout.identity(), self._device_type, self._names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={size}" for name, size in zip(self._names or (), self.shape, strict=False))
        shown = f"DeviceMesh({f'({named})' if named else self.shape}, '{self._device_type}'"
        shown += f", stride={self._layout.strides()}"
        if environ.TORCH_DISTRIBUTED_DEBUG.get() == "DETAIL":
            shown += f", Mesh: {self.mesh.tolist()}"
        return f"{shown})"


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """Arrange ranks 0, 1, ... as an array of this shape, and create a group of this rank's row along each dimension.

    Every rank calls it. Creates the default group if there is none. ``backend_override`` maps dimensions or their names
    to a backend's name, its options, or a tuple of both. Raises RuntimeError unless there is one distinct name per
    dimension, for a device type with an index and for a mesh larger than the default group.
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
    overrides = _read_overrides(backend_override, mesh_dim_names, len(mesh_shape))
    if device_type and not device_type.isalpha():
        raise RuntimeError(
            f"Device type with index is not supported but got {device_type}. "
            "If you maintained a device object, it's recommended to pass in 'device.type'."
        )
    ranks = np.arange(np.prod(mesh_shape, dtype=np.int64)).reshape(mesh_shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=overrides)


def _own_rank() -> int:
    return get_rank() if is_initialized() else -1


def _require_ranks(layout: MeshLayout) -> None:
    """Create the default group if there is none; raise RuntimeError when it does not have the ranks of the mesh."""
    if not is_initialized():
        init_process_group()
    size = get_world_size()
    if layout.root.size > size:
        raise RuntimeError(
            f"Mesh should not be bigger than default world size {size}, but found {layout.root.size} ranks!"
        )
    if layout.root.size and not 0 <= layout.root.min() <= layout.root.max() < size:
        raise RuntimeError(f"A mesh is made of the ranks 0 to {size - 1}, but found {layout.root.tolist()}.")


def _make_group(layout: MeshLayout, axis: Axis, name: str, override: Override) -> ProcessGroup | None:
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


def _read_overrides(given: Mapping[Any, Any] | None, names: Sequence[str] | None, count: int) -> tuple[Override, ...]:
    """Return the override of each dimension from ``backend_override``, whose keys are dimensions or their names.

    Raises RuntimeError for any other key, and for a dimension that is given by its number and its name.
    """
    rest = dict(given or {})
    overrides = []
    for dimension in range(count):
        keys = [key for key in (dimension, *(names or ())[dimension : dimension + 1]) if key in rest]
        if len(keys) == 2:
            raise RuntimeError(f"Found redundant dim index {keys[0]} and name {keys[1]} in backend_override")
        overrides.append(_read_override(rest.pop(keys[0])) if keys else NO_OVERRIDE)
    if rest:
        raise RuntimeError(
            f"Found invalid keys in backend_override: got {list(rest)}, expected integers in range [0, {count}) "
            f"or one of {tuple(names or ())}"
        )
    return tuple(overrides)


def _read_override(value: Any) -> Override:
    """Return an override from a backend's name, its options, a tuple of both, or None."""
    if isinstance(value, str):
        return value, None
    if isinstance(value, tuple) and len(value) == 2:
        return value
    return None, value
