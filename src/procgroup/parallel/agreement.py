"""What the ranks tell each other at the end of a round: which parameters were used, which came late, who failed.

Each of these is one byte, and all of them are combined by the maximum in one call of some hundred bytes. It follows the
buckets at once, when the ranks are in step, and costs a few microseconds.
"""

from __future__ import annotations

from procgroup.groups.group import ProcessGroup
from procgroup.types import ReduceOp


class Agreement:
    """The flags of one rank, and after ``settle`` those of all."""

    def __init__(self, group: ProcessGroup, count: int) -> None:
        self._group = group
        self._count = count
        self._nothing = bytes(3 * count + group.size())
        self._all_used = b"\1" * count
        # Indexed by parameter: used from 0, late from `count`, otherwise than in a static graph from 2 * `count`.
        self.flags: bytearray = bytearray(self._nothing)
        self._agreed = bytes(self._nothing)

    def mark_late(self, index: int) -> None:
        """Say that a gradient came after its bucket was issued."""
        self.flags[self._count + index] = 1

    def mark_changed(self, index: int) -> None:
        """Say that a parameter was not used as often as a static graph uses it."""
        self.flags[2 * self._count + index] = 1

    def mark_failed(self) -> None:
        """Say that this rank's backward failed."""
        self.flags[3 * self._count + self._group.rank()] = 1

    def settle(self) -> None:
        """Exchange the flags, and begin with new ones."""
        self._group.all_reduce(self.flags, ReduceOp.MAX)
        self._agreed = bytes(self.flags)
        self.flags[:] = self._nothing

    @property
    def is_plain(self) -> bool:
        """Tell whether every parameter was used on some rank, in time, and nobody failed."""
        return self._agreed.startswith(self._all_used) and self._agreed.find(1, self._count) < 0

    def is_used(self, index: int) -> bool:
        """Tell whether a parameter has a new gradient on any rank."""
        return self._agreed[index] == 1

    def late(self) -> list[int]:
        """Return the parameters whose gradient came late on any rank."""
        return [index for index in range(self._count) if self._agreed[self._count + index]]

    def is_changed(self) -> bool:
        """Tell whether any rank has left its static graph."""
        return self._agreed.find(1, 2 * self._count, 3 * self._count) >= 0

    def failed(self) -> list[int]:
        """Return the group ranks whose backward failed."""
        return [rank for rank in range(self._group.size()) if self._agreed[3 * self._count + rank]]
