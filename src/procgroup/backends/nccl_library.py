"""NCCL's library on this machine: where it is, what it lacks, and the options of its communicators.

Nothing of NVIDIA's is imported: native code calls the library, and CUDA's driver, through their addresses.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from procgroup.errors import DistBackendError

if TYPE_CHECKING:
    from procgroup import _native

_NAME = "libnccl.so.2"
_OLDEST = 22304
"""The oldest version that was tried."""
_FOLDERS = tuple(
    map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64"))
)
_INSTALL = "pip install nvidia-nccl-cu13 (or, for CUDA 12, nvidia-nccl-cu12)"

_MAGIC, _HEADER = 0xCAFEBEEF, 23203
"""What NCCL knows a configuration by, and the version of the header whose structure this is."""
UNSET = -(2**31)
"""What NCCL takes for an option that was not chosen."""
_TEXTS = ("net_name", "comm_name")


class _Config(ctypes.Structure):
    """ncclConfig_t, to which versions of NCCL append: an older library does not read the end."""

    _fields_: ClassVar[Any] = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cga_cluster_size", "min_ctas", "max_ctas")),
        ("net_name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("split_share", "traffic_class")),
        ("comm_name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("collnet_enable", "cta_policy", "shrink_share", "nvls_ctas")),
        *((name, ctypes.c_int) for name in ("n_channels_per_net_peer", "nvlink_centric_sched", "graph_usage_mode")),
        *((name, ctypes.c_int) for name in ("num_rma_ctx", "max_p2p_peers", "graph_stream_ordering")),
        *((name, ctypes.c_int) for name in ("launch_order_implicit", "num_rma_sig", "rma_eager_init")),
        *((name, ctypes.c_int) for name in ("host_cft_mode", "nvls_host_mode")),
    )


OPTIONS: Sequence[str] = tuple(name for name, _ in _Config._fields_ if name not in ("size", "magic", "version"))
"""The names of the options, in the manner of nccl.core.NCCLConfig."""
HIGH_PRIORITY = "is_high_priority_stream"
"""The option of torch's ProcessGroupNCCL.Options that is not NCCL's: of the group's streams."""


def is_installed() -> bool:
    """Return whether this process has NCCL, or would find it. There may still be no GPU."""
    return hasattr(ctypes.CDLL(None), "ncclGetVersion") or _path() is not None


@cache
def load() -> _native.NcclLibrary:
    """Load NCCL and CUDA's driver.

    Raises DistBackendError where one of them, or every GPU, is missing, and where NCCL is too old.
    """
    from procgroup import _native

    if not is_installed():
        raise DistBackendError(f"The backend 'nccl' needs NVIDIA's NCCL ({_NAME}), which is not here. {_install()}")
    try:
        gpus = _native.count_gpus()
    except RuntimeError as error:
        raise DistBackendError(f"The backend 'nccl' needs a GPU, but {error}.") from error
    if gpus == 0:
        raise DistBackendError(
            "The backend 'nccl' needs a GPU, and this process has none: is CUDA_VISIBLE_DEVICES set? Without GPUs, use "
            "the backend 'gloo'."
        )
    try:
        library = _native.NcclLibrary("" if _path() is None else str(_path()))
    except RuntimeError as error:
        raise DistBackendError(f"{_NAME} cannot be loaded ({error}). {_install()}") from error
    if library.version < _OLDEST:
        raise DistBackendError(
            f"The backend 'nccl' needs NCCL {_text_of(_OLDEST)} or later, and this process has loaded "
            f"{_text_of(library.version)}. Install a later one: {_INSTALL}."
        )
    return library


def read_options(options: Any) -> Mapping[str, Any]:
    """Return fields of nccl.core.NCCLConfig and HIGH_PRIORITY, given as a dict; or the fields as such an object.

    Raises TypeError for another type, ValueError for an unknown name.
    """
    if is_configuration(options):
        options = {name: value for name in OPTIONS if (value := getattr(options, name, None)) is not None}
    if not isinstance(options, Mapping):
        raise TypeError(f"Expected the options of NCCL to be a dict or an NCCLConfig, got {options!r}")
    unknown = sorted(str(name) for name in options if name not in (*OPTIONS, HIGH_PRIORITY))
    if unknown:
        raise ValueError(f"NCCL has no options {unknown}; expected {', '.join((*OPTIONS, HIGH_PRIORITY))}")
    for name, value in options.items():
        expected = str if name in _TEXTS else int
        if not isinstance(value, expected):
            raise TypeError(f"Expected the option {name!r} of NCCL to be of type {expected.__name__}, got {value!r}")
    if options.get("blocking", 1) != 1:
        raise ValueError(
            "NCCL's communicators are blocking here, since others start a thread for each call: blocking=0"
        )
    return options


def is_configuration(options: Any) -> bool:
    """Return whether these are options in nccl4py's own class."""
    known: Any = getattr(sys.modules.get("nccl.core"), "NCCLConfig", ())
    return isinstance(options, known)


def configuration(options: Mapping[str, Any]) -> bytes:
    """Return an ncclConfig_t. The texts in it live as long as this process."""
    config = _Config(size=ctypes.sizeof(_Config), magic=_MAGIC, version=_HEADER)
    for name in OPTIONS:
        if name not in _TEXTS:
            setattr(config, name, int(options.get(name, UNSET)))
        elif name in options:
            setattr(config, name, _kept(options[name]))
    config.blocking = 1
    return bytes(config)


@cache
def _kept(text: str) -> bytes:
    return text.encode()


@cache
def _path() -> Path | None:
    """Return the library of NVIDIA's wheel, else that of the system."""
    named = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = [*_folders_of_wheel(), *map(Path, filter(None, named)), Path(sys.prefix, "lib"), *_FOLDERS]
    return next((path for folder in folders if (path := folder / _NAME).exists()), None)


def _folders_of_wheel() -> list[Path]:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    return [Path(place, "lib") for place in (spec.submodule_search_locations or ())] if spec else []


def _install() -> str:
    return f"Install it: {_INSTALL}."


def _text_of(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
