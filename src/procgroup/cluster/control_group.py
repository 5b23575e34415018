"""The control groups (cgroups) of this process: their directories, quota of cores, and out-of-memory kills.

::

    /proc/self/cgroup      the group in each hierarchy    4:memory:/jobs/17       0::/user.slice
    /proc/self/mountinfo   the mounts of hierarchies      ... /jobs /sys/fs/cgroup/memory ... - cgroup cgroup rw,memory

A container often sees only its own part of a hierarchy. Then the mount's root (``/jobs`` above) is a prefix of the
group's path; or it is unrelated to that path, and the mount point is the group itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple


def directories(controller: str, process: Path = Path("/proc/self")) -> list[Path]:
    """Return the directories of this process's group for a controller: its own first, then its ancestors'.

    Supports version 1 (one hierarchy per controller) and version 2 (one for all). Where both are mounted, version 1
    is used if it has the controller, which is in one version only. Empty without control groups.
    """
    try:
        groups = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:
        return []
    for kind, path in _memberships(groups, controller):
        for root, mount_point in _mounts(mounts, kind, controller):
            return _from_own_to_top(mount_point, root, path)
    return []


def _memberships(lines: list[str], controller: str) -> list[tuple[str, str]]:
    """Return (file system type, path) of the groups that may hold the controller, version 1 first."""
    found: list[tuple[str, str]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            found.insert(0, ("cgroup", path))
        elif not controllers:
            found.append(("cgroup2", path))
    return found


def _mounts(lines: list[str], kind: str, controller: str) -> list[tuple[str, Path]]:
    """Return (root, mount point) of the mounted hierarchies of this type that hold the controller."""
    found = []
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, (file_system, _, options) = before.split(" "), after.split(" ", 2)
        if file_system == kind and (kind == "cgroup2" or controller in options.split(",")):
            found.append((fields[3], Path(fields[4])))
    return found


def _from_own_to_top(mount_point: Path, root: str, path: str) -> list[Path]:
    group = PurePosixPath(path)
    if not group.is_relative_to(root):
        return [mount_point]
    own = mount_point / group.relative_to(root)
    return [own, *(parent for parent in own.parents if parent.is_relative_to(mount_point))]


def usable_cores() -> int:
    """Return the number of cores that this process and its children can keep busy, at least 1.

    A quota of 2.5 cores counts as 2, because a third busy thread would be throttled in every period.
    """
    quota = quota_of(directories("cpu"))
    cores = cores_by_affinity()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cores_by_affinity() -> int:
    """Return the number of cores that the scheduler may place this process on."""
    return len(os.sched_getaffinity(0))


def quota_of(directories: Iterable[Path]) -> float | None:
    """Return the smallest quota, in cores, that these control groups set; None when none is set."""
    quotas = [quota for directory in directories if (quota := _quota(directory)) is not None]
    return min(quotas, default=None)


def _quota(directory: Path) -> float | None:
    """Read one group's quota: ``cpu.max`` in version 2, ``cpu.cfs_*_us`` in version 1."""
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text()
            period = (directory / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):
        return None


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
        for directory in directories("memory", process)[:1]:
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
