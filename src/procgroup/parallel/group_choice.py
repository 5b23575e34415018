"""Which group ``process_group=given`` means in training: one of procgroup's, or the one under a group of torch's.

A program that says ``torch.distributed.init_process_group("procgroup")`` has groups of torch, and procgroup's are under
them. So these are taken wherever a group may be given; and where none is and procgroup has no default group, torch's
default one is meant.
"""

from __future__ import annotations

import sys
from typing import Any

from procgroup.api import default
from procgroup.api.membership import resolve
from procgroup.groups.group import ProcessGroup


def group_of(given: Any) -> ProcessGroup:
    """Return the group that is meant. Raises ValueError when it is none, and for a group of another backend."""
    if given is None:
        given = default_group()
    distributed = _torch_distributed()
    if distributed is None or not isinstance(given, distributed.ProcessGroup):
        return resolve(given)
    under = _under(given)
    if under is None:
        raise ValueError(
            f"Invalid process group specified: {given!r} of torch.distributed has another backend for CPU tensors. "
            'Make it with torch.distributed.new_group(backend="procgroup"), or pass a group of procgroup.new_group().'
        )
    return under


def default_group() -> Any:
    """Return procgroup's default group or else torch's, where that is procgroup's plug-in; None for neither."""
    own = default.slot().group
    distributed = _torch_distributed()
    if own is not None or distributed is None or not distributed.is_initialized():
        return own
    world = distributed.group.WORLD
    return world if _under(world) is not None else None


def is_group(given: Any) -> bool:
    """Tell whether this is a group, of procgroup or of torch."""
    distributed = _torch_distributed()
    return isinstance(given, ProcessGroup) or (distributed is not None and isinstance(given, distributed.ProcessGroup))


def _under(group: Any) -> ProcessGroup | None:
    """Return procgroup's group under one of torch's."""
    try:
        backend = group._get_backend(sys.modules["torch"].device("cpu"))
    except RuntimeError:  # it has none for CPU tensors
        return None
    found = getattr(backend, "group", None)
    return found if isinstance(found, ProcessGroup) else None


def _torch_distributed() -> Any | None:
    """Return torch.distributed where it is loaded and can be used."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and distributed.is_available() else None
