"""Evidence that the kernel killed a process because memory ran out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from procgroup.cluster import control_group


@dataclass(frozen=True)
class OutOfMemoryKills:
    """How many processes the kernel has killed so far for want of memory.

    ``group`` counts this process's control group (0 where that is not shown), ``host`` the whole machine.
    """

    group: int
    host: int

    @classmethod
    def so_far(cls) -> OutOfMemoryKills:
        """Read the counters now."""
        group = 0
        for directory in control_group.directories("memory")[:1]:
            group = max(_counter(directory / "memory.events"), _counter(directory / "memory.oom_control"))
        return cls(group=group, host=_counter(Path("/proc/vmstat")))

    def since(self, earlier: OutOfMemoryKills) -> OutOfMemoryKills:
        """Return how many were killed between an earlier reading and this one."""
        return OutOfMemoryKills(group=self.group - earlier.group, host=self.host - earlier.host)


def _counter(path: Path) -> int:
    """Return the number in the line ``oom_kill <number>``; 0 without such a file or line."""
    try:
        lines = path.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0
