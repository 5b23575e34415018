"""Evidence that the kernel killed a process because memory ran out."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from procgroup.cluster import control_group

_HOST_COUNTERS = Path("/proc/vmstat")


class OutOfMemoryKills(NamedTuple):
    """The number of processes that the kernel has killed for want of memory; None where it is unknown.

    ``group`` counts this process's control group, ``host`` the whole machine.
    """

    group: int | None
    host: int | None

    @classmethod
    def so_far(cls, process: Path = Path("/proc/self"), host: Path = _HOST_COUNTERS) -> OutOfMemoryKills:
        """Read the counters."""
        group = None
        for directory in control_group.directories("memory", process)[:1]:
            # Version 2 counts in the first file, version 1 in the second.
            group = _counter(directory / "memory.events")
            group = _counter(directory / "memory.oom_control") if group is None else group
        return cls(group=group, host=_counter(host))

    def since(self, earlier: OutOfMemoryKills) -> OutOfMemoryKills:
        """Return how many were killed between an earlier reading and this one."""
        return OutOfMemoryKills(group=_difference(self.group, earlier.group), host=_difference(self.host, earlier.host))

    @property
    def any_of_group(self) -> bool:
        """Whether a process of this control group was killed; of the host, where the group's count is unknown."""
        return bool(self.host if self.group is None else self.group)

    @property
    def verdict(self) -> str:
        """The counters in words, for the report of a process that was killed meanwhile."""
        if self.group or self.host:
            where = "control group" if self.group else "host"
            return f"the kernel killed {self.group or self.host} process(es) of this {where} for want of memory"
        if self.group is None and self.host is None:
            return "this system does not show whether memory ran out"
        return "no out-of-memory kill was seen, so somebody sent the signal"


def _difference(now: int | None, earlier: int | None) -> int | None:
    return None if now is None or earlier is None else now - earlier


def _counter(path: Path) -> int | None:
    """Return the number in the line ``oom_kill <number>``; None without such a file or line."""
    try:
        lines = path.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError):
        return None
