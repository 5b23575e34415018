"""Backends by name: the known names, their availability, and how backends are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from procgroup.backends import mpi, nccl, nccl_library
from procgroup.errors import DistBackendError
from procgroup.groups.backend import AnyBackend, Backend
from procgroup.stores.prefix import PrefixStore
from procgroup.stores.store import Store

DEFAULT = "gloo"
"""What None means for arrays in CPU memory. Programs that ask for Gloo get procgroup's own transport by that name."""

BackendFactory = Callable[[Store, int, int, timedelta], Backend]
"""Makes a registered backend for one group from the group's store, rank, size and timeout."""

_OURS = ("gloo", "procgroup")
_KNOWN = ("gloo", "procgroup", "nccl", "mpi", "ucc", "xccl")
_registered: dict[str, tuple[BackendFactory, tuple[str, ...]]] = {}
_DEVICES = {"mpi": ("cpu",), "nccl": ("cuda",)}
_DEFAULT_FOR_DEVICE = {"cpu": "gloo", "cuda": "nccl"}


class BackendConfig(NamedTuple):
    """The requested backends: a name for each kind of device. ``name`` is the result of get_backend."""

    name: str
    by_device: Mapping[str, str]
    gpu: int | None = None
    """The number of the GPU that this rank uses, where it is known before the first call."""
    nccl_options: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.by_device.items())

    def make_backends(self, store: Store, rank: int, size: int, timeout: timedelta) -> Mapping[str, AnyBackend]:
        """Make the backends of a group, by kind of device; none for devices that the engine's own transport serves."""
        made: dict[str, AnyBackend] = {}
        for device, name in self.by_device.items():
            own_store = PrefixStore(f"backend/{name}/{device}", store)
            if name in _registered:
                made[device] = _registered[name][0](own_store, rank, size, timeout)
            elif name == "mpi" and device == "cpu":
                made[device] = mpi.MpiBackend(own_store, rank, size, timeout)
            elif name == "nccl" and device == "cuda":
                make_nccl = nccl.NcclBackend if self.gpu is None else nccl.EagerNcclBackend
                made[device] = make_nccl(own_store, rank, size, timeout, device=self.gpu, options=self.nccl_options)
        return made

    def load(self) -> None:
        """Load the libraries of these backends, before the ranks join, so that a rank that cannot says so."""
        if "mpi" in self.by_device.values():
            mpi.load()
        # Beside another backend it is loaded for the first array on a GPU, which may never come.
        if self.name == "nccl" or (self.gpu is not None and "nccl" in self.by_device.values()):
            nccl_library.load()


def is_backend_available(backend: str) -> bool:
    """Return whether the libraries that a backend needs are installed."""
    name = backend.lower()
    is_installed: Mapping[str, Callable[[], bool]] = {"mpi": mpi.is_installed, "nccl": nccl_library.is_installed}
    return name in (*_OURS, *_registered) or (name in is_installed and is_installed[name]())


def register_backend(name: str, make: BackendFactory, devices: Sequence[str]) -> None:
    """Register a backend under ``name`` for these kinds of devices, for groups that are made from now on.

    Raises ValueError for a name that a backend has already.
    """
    name = name.lower()
    if name in (*_KNOWN, *_registered):
        raise ValueError(f"Backend {name!r} exists already; expected another name than {', '.join(_names())}.")
    _registered[name] = (make, tuple(devices))


def default_backend_for_device(device: object) -> str:
    """Return the backend's name for "cpu", "cuda:1" or an object with a ``type``. Raises ValueError for others."""
    kind = device if isinstance(device, str) else getattr(device, "type", None)
    name = _DEFAULT_FOR_DEVICE.get(kind.split(":")[0]) if isinstance(kind, str) else None
    if name is None:
        raise ValueError(f"Default backend not registered for device : {device}")
    return name


def parse(backend: str | None) -> BackendConfig:
    """Read "gloo", "mpi", "nccl", or "cpu:gloo,cuda:nccl". None means "gloo", and "nccl" for arrays on GPUs.

    Raises TypeError when it is not a string, ValueError for an unknown name or form, and DistBackendError for a backend
    that this version does not have. Of "cpu:gloo,cuda:nccl" NCCL may be missing: the error comes only when an array on
    a GPU is used.
    """
    if backend is None:
        on_gpus = {"cuda": "nccl"} if nccl_library.is_installed() else {}
        return BackendConfig(DEFAULT, {"cpu": DEFAULT, **on_gpus})
    if not isinstance(backend, str):
        raise TypeError(f"Expected parameter `backend` to be a str, got {backend!r} of type {type(backend).__name__}.")
    if ":" in backend:
        return _parse_devices(backend.lower())
    name = backend.lower()
    _check_known(name, backend)
    _check_available(name, backend)
    return BackendConfig(name, dict.fromkeys(_devices_of(name), name))


def _parse_devices(backend: str) -> BackendConfig:
    by_device: dict[str, str] = {}
    for part in backend.split(","):
        device, colon, name = part.strip().partition(":")
        if not (device and colon and name) or device in by_device:
            raise ValueError(
                f"Invalid backend {backend!r}: expected one backend's name, or device:name pairs for "
                "different devices, such as 'cpu:gloo,cuda:nccl'."
            )
        _check_known(name, backend)
        by_device[device] = name
    for device, name in by_device.items():
        if device not in _devices_of(name):
            raise ValueError(f"Backend {name!r} in {backend!r} is for {' and '.join(_devices_of(name))}, not {device}.")
    _check_available(by_device.get("cpu", DEFAULT), backend)
    return BackendConfig(next(iter(by_device.values())) if len(by_device) == 1 else backend, by_device)


def _check_known(name: str, backend: str) -> None:
    if name not in _names():
        raise ValueError(f"Unknown backend type {name!r} in {backend!r}; expected one of {', '.join(_names())}.")


def _names() -> tuple[str, ...]:
    return (*_KNOWN, *_registered)


def _devices_of(name: str) -> tuple[str, ...]:
    if name in _DEVICES:
        return _DEVICES[name]
    return _registered[name][1] if name in _registered else ("cpu", "cuda")


def _check_available(name: str, backend: str) -> None:
    if name == "mpi" and not mpi.is_installed():
        mpi.load()  # which raises
    if name == "nccl" and not nccl_library.is_installed():
        nccl_library.load()  # which raises
    if not is_backend_available(name):
        raise DistBackendError(
            f"Backend {name!r} (from {backend!r}) is not in this version of procgroup. Use 'gloo', which names its own "
            "transport, 'mpi', or 'nccl' for arrays on GPUs."
        )


def check_engine(size: int) -> None:
    """Raise DistBackendError when a group of this size cannot be made here; called before the ranks join."""
    try:
        import procgroup.backends.native  # noqa: F401
    except ImportError as error:
        raise DistBackendError(
            f"procgroup's native engine cannot be loaded ({error}), and a group of {size} ranks needs it. "
            "Build and install the package: pip install ."
        ) from error
