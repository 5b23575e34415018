"""The names of backends as torch.distributed spells them."""

from __future__ import annotations

from typing import Any

from procgroup.backends import registry


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
