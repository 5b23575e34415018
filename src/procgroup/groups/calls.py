"""What the calls of a group have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procgroup.groups.backend import Backend, Operation
from procgroup.groups.work import Work


class GroupCalls:
    """The state of a group that its calls need."""

    _backend: Backend
    _rank: int
    _size: int
    _seconds: float
    members: tuple[int, ...]
    group_name: str

    def _where(self) -> str:
        return f"group {self.group_name} (rank {self._rank} of {self._size})"

    def _work(self, operation: Operation, op: str, arrays: Sequence[Any]) -> Work:
        return Work(operation, op, list(arrays), self)
