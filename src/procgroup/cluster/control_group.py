"""The control groups (cgroups) of this process, and their directories.

::

    /proc/self/cgroup      the group in each hierarchy    4:memory:/jobs/17       0::/user.slice
    /proc/self/mountinfo   the mounts of hierarchies      ... /jobs /sys/fs/cgroup/memory ... - cgroup cgroup rw,memory

A container often sees only its own part of a hierarchy. Then the mount's root (``/jobs`` above) is a prefix of the
group's path; or it is unrelated to that path, and the mount point is the group itself.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath


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
