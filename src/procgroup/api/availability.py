"""The backends: their names in torch.distributed, which are available, and the backend of a group."""

from __future__ import annotations

from typing import Any

from procgroup import _native
from procgroup.api.default_group import Group, resolve
from procgroup.backends import registry
from procgroup.process import environ
from procgroup.types import AnyReduceOp, PremulSum


class Backend(str):
    """A backend's name in small letters: ``Backend("GLOO") == Backend.GLOO == "gloo"``."""

    __slots__ = ()

    UNDEFINED = "undefined"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"

    def __new__(cls, name: Any) -> Backend:
        """Raises ValueError unless ``name`` is a str."""
        if not isinstance(name, str):
            raise ValueError(f"Backend constructor parameter must be string-ish, got {name!r}")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: registry.BackendFactory,
        extended_api: bool = False,
        devices: str | list[str] | None = None,
    ) -> None:
        """Let ``init_process_group(name)`` use a backend of another author, on these kinds of devices (None: "cpu").

        ``func(store, rank, world_size, timeout)`` makes it, for each group: see procgroup.groups.backend.Backend.
        Raises ValueError for a name that is taken, and for ``extended_api=True``, because it passes a class of torch.
        """
        if extended_api:
            raise ValueError("Expected parameter `extended_api` to be False: func takes (store, rank, size, timeout).")
        registry.register_backend(name, func, [devices] if isinstance(devices, str) else devices or ["cpu"])


class BackendConfig:
    """Which backend moves the arrays of which device: ``str`` of it is "cpu:gloo,cuda:nccl"."""

    def __init__(self, backend: str) -> None:
        """Read a backend's name or device:name pairs. Raises what init_process_group raises for them."""
        self._config = registry.parse(backend)

    def get_device_backend_map(self) -> dict[str, Backend]:
        """Return the backend's name for each kind of device."""
        return {device: Backend(name) for device, name in self._config.by_device.items()}

    def __repr__(self) -> str:
        return str(self._config)


def is_available() -> bool:
    """Return whether process groups can be used here: always True."""
    return True


def is_torchelastic_launched() -> bool:
    """Return whether a launcher started this process: whether TORCHELASTIC_RUN_ID is set."""
    return environ.TORCHELASTIC_RUN_ID.is_set()


def is_backend_available(backend: str) -> bool:
    """Return whether ``init_process_group(backend)`` can work here."""
    return registry.is_backend_available(backend)


def is_gloo_available() -> bool:
    """Return whether "gloo" is available: always True, as a name of procgroup's own transport."""
    return registry.is_backend_available("gloo")


def is_mpi_available() -> bool:
    """Return whether mpi4py, which "mpi" requires, is installed. An MPI library may still be missing."""
    return registry.is_backend_available("mpi")


def is_nccl_available() -> bool:
    """Return whether NCCL's library, over which "nccl" works, is installed. There may still be no GPU."""
    return registry.is_backend_available("nccl")


def is_ucc_available() -> bool:
    """Return False: procgroup has no backend "ucc"."""
    return registry.is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return False: procgroup has no backend "xccl"."""
    return registry.is_backend_available("xccl")


def supports_complex(reduceOp: AnyReduceOp) -> bool:  # noqa: N803 - torch.distributed's name
    """Return whether a reduce op exists for complex arrays: SUM, AVG, PREMUL_SUM and, unlike in torch, PRODUCT."""
    return _native.supports(reduceOp.op if isinstance(reduceOp, PremulSum) else reduceOp, "complex64")


def get_backend(group: Group = None) -> str:
    """Return the backend's name as it was asked for; ``group.transport`` says what moves the bytes.

    Raises ValueError when this rank is not in the group.
    """
    return resolve(group).name()


def get_backend_config(group: Group = None) -> str:
    """Return the backend's name for each kind of device, such as "cpu:gloo,cuda:gloo"."""
    return resolve(group).backend_config


def get_default_backend_for_device(device: object) -> str:
    """Return the default backend for arrays on a device. Raises ValueError for an unknown device."""
    return registry.default_backend_for_device(device)
