"""Choose the process group for training: a given group of procgroup or of torch, or the default group.

A program that calls ``torch.distributed.init_process_group("procgroup")`` has groups of torch, each with a group of
procgroup as its backend. Training accepts both kinds. Without a given group and without a default group of procgroup,
it uses torch's default group.
"""

from __future__ import annotations

import sys
from typing import Any

from procgroup.api.default_group import resolve, slot
from procgroup.groups.group import ProcessGroup


def group_of(given: Any) -> ProcessGroup:
    """Return procgroup's group for a group of procgroup or torch, or for None.

    Raises ValueError for an object that is not a group, and for a group of another backend.
    """
    if given is None:
        given = default_group()
    distributed = _torch_distributed()
    if distributed is None or not isinstance(given, distributed.ProcessGroup):
        return resolve(given)
    backend_group = _backend_group(given)
    if backend_group is None:
        raise ValueError(
            f"Invalid process group specified: {given!r} of torch.distributed has another backend for CPU tensors. "
            'Make it with torch.distributed.new_group(backend="procgroup"), or pass a group of procgroup.new_group().'
        )
    return backend_group


def default_group() -> Any:
    """Return procgroup's default group, or torch's if procgroup is its backend, or None."""
    own = slot().group
    distributed = _torch_distributed()
    if own is not None or distributed is None or not distributed.is_initialized():
        return own
    world = distributed.group.WORLD
    return world if _backend_group(world) is not None else None


def is_group(given: Any) -> bool:
    """Return whether an object is a group of procgroup or of torch."""
    distributed = _torch_distributed()
    return isinstance(given, ProcessGroup) or (distributed is not None and isinstance(given, distributed.ProcessGroup))


def _backend_group(group: Any) -> ProcessGroup | None:
    """Return the group of procgroup that is the backend of torch's group for CPU tensors."""
    try:
        backend = group._get_backend(sys.modules["torch"].device("cpu"))
    except RuntimeError:  # there is no backend for CPU tensors
        return None
    found = getattr(backend, "group", None)
    return found if isinstance(found, ProcessGroup) else None


def _torch_distributed() -> Any | None:
    """Return torch.distributed if it is imported and available."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and distributed.is_available() else None
