"""The options of groups: ``pg_options``, and procgroup's own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from procgroup import types
from procgroup.backends import nccl_library, registry
from procgroup.process.timeouts import context_timeout
from procgroup.types import DEFAULT_TIMEOUT, Timeout

default_pg_timeout = DEFAULT_TIMEOUT

NCCL_TIMEOUT = timedelta(minutes=10)
"""The default timeout of groups with the backend "nccl", as in torch.distributed."""

_NAMES = ("timeout", "init_method_timeout", "deterministic", "nccl")


class Timeouts(NamedTuple):
    """How long a group's calls may take, how long the ranks may take to find each other, and then to make the group."""

    calls: timedelta
    rendezvous: timedelta
    start: timedelta


def read_timeouts(timeout: Timeout | None, pg_options: Any, default: Timeout = DEFAULT_TIMEOUT) -> Timeouts:
    """Read the timeouts; the keyword wins over ``pg_options``, a dict of "timeout" and "init_method_timeout".

    Inside ``with timeout(...)``, a group without its own timeout starts with the block's timeout. Its calls use
    ``default``, because the group outlives the block. Raises TypeError for other types, ValueError for a dict with
    other names.
    """
    options = _as_mapping(pg_options)
    own = (timeout, options.get("timeout"))
    start = _first(*own, context_timeout(), default)
    return Timeouts(_first(*own, default), _first(options.get("init_method_timeout"), start), start)


def read_deterministic(deterministic: str | None, pg_options: Any) -> bool:
    """Return whether the keyword or ``pg_options["deterministic"]`` asks for rank order.

    Raises ValueError unless each is None or "order".
    """
    asked = (deterministic, _as_mapping(pg_options).get("deterministic"))
    for value in asked:
        if value not in (None, "order"):
            raise ValueError(f"Expected `deterministic` to be None or 'order', got {value!r}.")
    return "order" in asked


def read_backend(backend: str | None, device_id: Any, pg_options: Any) -> registry.BackendConfig:
    """Read which backends move the arrays of a group, with the GPU and the options of NCCL.

    ``device_id`` is the number of a GPU, "cuda:1", or an object with ``type`` and ``index``; devices of other types
    are ignored. ``pg_options`` may be an nccl.core.NCCLConfig, or a dict with its fields, or have either as "nccl".
    Raises what registry.parse raises, TypeError for a device or an option of another type, ValueError for an unknown
    option.
    """
    config = registry.parse(backend)
    _as_mapping(pg_options)
    if "nccl" not in config.by_device.values():
        return config
    options = pg_options
    if isinstance(pg_options, Mapping):
        options = pg_options.get("nccl") or {name: pg_options[name] for name in pg_options if name not in _NAMES}
    given = nccl_library.read_options(options) if options else None
    gpu = gpu_of(device_id)  # without a backend's name there need be no GPU
    return config._replace(gpu=None if backend is None else gpu, nccl_options=given)


def gpu_of(device_id: Any, name: str = "device_id") -> int | None:
    """Return the number of a GPU as in read_backend; None for devices of other types."""
    if device_id is None:
        return None
    if isinstance(device_id, str):
        kind, _, digits = device_id.partition(":")
        number = int(digits) if digits.isdigit() else None
    else:
        kind, number = getattr(device_id, "type", "cuda"), getattr(device_id, "index", device_id)
    if kind != "cuda":
        return None
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise TypeError(f"Expected `{name}` to be the number of a GPU, or 'cuda:number', got {device_id!r}.")
    return number


def _as_mapping(pg_options: Any) -> Mapping[str, Any]:
    if pg_options is None or nccl_library.is_configuration(pg_options):
        return {}
    if not isinstance(pg_options, Mapping):
        raise TypeError(f"Expected pg_options argument to be a dict or an nccl.core.NCCLConfig, got {pg_options!r}")
    unknown = {name for name in pg_options if name not in _NAMES}
    unknown.difference_update((*nccl_library.OPTIONS, nccl_library.HIGH_PRIORITY))
    if unknown:
        expected = ", ".join((*_NAMES, *nccl_library.OPTIONS, nccl_library.HIGH_PRIORITY))
        raise ValueError(f"pg_options has unknown names {sorted(map(str, unknown))}; expected {expected}")
    return pg_options


def _first(*timeouts: Timeout | None) -> timedelta:
    chosen = next(timeout for timeout in timeouts if timeout is not None)
    seconds = types.seconds(chosen)
    return chosen if isinstance(chosen, timedelta) else types.as_timedelta(seconds)
