"""Whose process groups a program of torch.distributed has made: a group of Gloo must not pass for one of procgroup."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_down(file: Path) -> None:
    """Have the class of each group that this process will make written into a file."""
    from torch.distributed import distributed_c10d as c10d

    make = c10d._new_process_group_helper

    def made(*args: Any, **kwargs: Any) -> Any:
        group, store = make(*args, **kwargs)
        if isinstance(group, c10d.ProcessGroup):
            with file.open("a") as groups:
                groups.write(f"{_class_under(group)}\n")
        return group, store

    c10d._new_process_group_helper = made


def _class_under(group: Any) -> str:
    """Return the name of the class that does the work: the group's own, or that of its backend for CPU."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    worker = group
    if type(group) is c10d.ProcessGroup:
        worker = group._get_backend(torch.device("cpu"))
    while isinstance(worker, c10d._ProcessGroupWrapper):
        worker = worker.wrapped_pg
    return f"{type(worker).__module__}.{type(worker).__qualname__}"


def strangers(place: Path, library: str) -> str:
    """Return the classes, written to files in ``place``, that are not the library's; "none" where there is no group."""
    groups = {line for file in place.glob("*.groups") for line in file.read_text().splitlines()}
    return ", ".join(sorted(group for group in groups or {"none"} if not group.startswith(f"{library}.")))
