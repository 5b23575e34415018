"""Flags that the ranks exchange at the end of a round: used parameters, late gradients, graph changes, failed ranks.

Each flag is one byte; one all_reduce with MAX combines all of them. It follows the buckets at once and takes a few
microseconds when the ranks are in step.
"""

from __future__ import annotations

from procgroup.groups.group import ProcessGroup
from procgroup.types import ReduceOp


class SynchronizedFlags:
    """The flags that this rank sets during a round and, after ``synchronize``, those of all ranks."""

    def __init__(self, group: ProcessGroup, count: int) -> None:
        self._group = group
        self._count = count
        self._zeros = bytes(3 * count + group.size())
        self._all_used = b"\1" * count
        # By parameter: used from 0, late from `count`, changed from 2 * `count`. By rank: failed from 3 * `count`.
        self.local: bytearray = bytearray(self._zeros)
        self._combined = bytes(self._zeros)

    def mark_late(self, index: int) -> None:
        """Mark a gradient that arrived after its bucket was packed, or that has no bucket."""
        self.local[self._count + index] = 1

    def mark_changed(self, index: int) -> None:
        """Mark a parameter that was not used as often as in the first round of a static graph."""
        self.local[2 * self._count + index] = 1

    def mark_failed(self) -> None:
        """Mark this rank's backward as failed."""
        self.local[3 * self._count + self._group.rank()] = 1

    def synchronize(self) -> None:
        """Combine the flags of all ranks; the local ones stay until ``clear``."""
        combined = bytearray(self.local)
        self._group.all_reduce(combined, ReduceOp.MAX)
        self._combined = bytes(combined)

    def clear(self) -> None:
        """Clear the local flags, for the next round."""
        self.local[:] = self._zeros

    def change_group(self, group: ProcessGroup) -> None:
        """Synchronize with the ranks of another group from now on."""
        has_failed = any(self.local[3 * self._count :])
        self._group = group
        self._zeros = bytes(3 * self._count + group.size())
        self.local[3 * self._count :] = bytes(group.size())
        if has_failed:
            self.mark_failed()

    @property
    def all_used_in_time(self) -> bool:
        """Whether every parameter was used on some rank, no gradient was late and no rank failed."""
        return self._combined.startswith(self._all_used) and self._combined.find(1, self._count) < 0

    def is_used(self, index: int) -> bool:
        """Return whether a parameter has a new gradient on any rank."""
        return self._combined[index] == 1

    def late(self) -> list[int]:
        """Return the indices of parameters with a late gradient on any rank."""
        return [index for index in range(self._count) if self._combined[self._count + index]]

    def is_changed(self) -> bool:
        """Return whether the graph has changed on any rank."""
        return self._combined.find(1, 2 * self._count, 3 * self._count) >= 0

    def failed(self) -> list[int]:
        """Return the group ranks with a failed backward."""
        return [rank for rank in range(self._group.size()) if self._combined[3 * self._count + rank]]
