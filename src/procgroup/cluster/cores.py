"""The number of processor cores that this process may use: limited by the host, its affinity and its quota."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from procgroup.cluster import control_group


def usable_cores() -> int:
    """Return the number of cores that this process and its children can keep busy, at least 1.

    A quota of 2.5 cores counts as 2, because a third busy thread would be throttled in every period.
    """
    quota = quota_of(control_group.directories("cpu"))
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
