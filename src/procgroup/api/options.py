"""The options of groups: ``pg_options``, and procgroup's own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from procgroup import types
from procgroup.types import DEFAULT_TIMEOUT, Timeout

default_pg_timeout = DEFAULT_TIMEOUT

_NAMES = ("timeout", "init_method_timeout", "deterministic")


class Timeouts(NamedTuple):
    """How long a group's calls may take, and how long the ranks may take to find each other."""

    calls: timedelta
    rendezvous: timedelta


def read_timeouts(timeout: Timeout | None, pg_options: Any, default: Timeout = DEFAULT_TIMEOUT) -> Timeouts:
    """Read the timeouts; the keyword wins over ``pg_options``, a dict of "timeout" and "init_method_timeout".

    Raises TypeError for other types, ValueError for a dict with other names.
    """
    options = _as_mapping(pg_options)
    calls = _first(timeout, options.get("timeout"), default)
    return Timeouts(calls, _first(options.get("init_method_timeout"), calls))


def read_deterministic(deterministic: str | None, pg_options: Any) -> bool:
    """Tell whether the keyword or ``pg_options["deterministic"]`` asks for rank order.

    Raises ValueError unless each is None or "order".
    """
    asked = (deterministic, _as_mapping(pg_options).get("deterministic"))
    for value in asked:
        if value not in (None, "order"):
            raise ValueError(f"Expected `deterministic` to be None or 'order', got {value!r}.")
    return "order" in asked


def _as_mapping(pg_options: Any) -> Mapping[str, Any]:
    if pg_options is None:
        return {}
    if not isinstance(pg_options, Mapping):
        raise TypeError(f"Expected pg_options argument to be a dict of {_NAMES}, got {pg_options!r}")
    unknown = sorted(str(name) for name in pg_options if name not in _NAMES)
    if unknown:
        raise ValueError(f"pg_options has unknown names {unknown}; expected {', '.join(_NAMES)}")
    return pg_options


def _first(*timeouts: Timeout | None) -> timedelta:
    chosen = next(timeout for timeout in timeouts if timeout is not None)
    seconds = types.seconds(chosen)
    return chosen if isinstance(chosen, timedelta) else timedelta(seconds=seconds)
