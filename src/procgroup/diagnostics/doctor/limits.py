"""The limits of this process: open files, locked memory, processes, and connections that wait to be accepted."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning
from procgroup.diagnostics.doctor.system_files import control_groups, read_number, show_bytes

Limits = Callable[[int], tuple[int, int]]

# A rank has a descriptor for each other rank, and the process that hosts the store has one more for each rank.
_FILES_PER_RANK = 3
_OTHER_FILES = 64
_AMPLE_FILES = 1024
# A rank has a few threads of its own; the thread pools of NumPy and PyTorch have one for each CPU.
_NEEDED_PROCESSES = 16
_AMPLE_PROCESSES = 256
_AMPLE_BACKLOG = 128


def check(world_size: int = 1, root: Path = Path("/"), limit_of: Limits = resource.getrlimit) -> Iterator[Finding]:
    """Yield findings about limits, for a job of ``world_size`` ranks."""
    yield _open_files(limit_of, world_size)
    yield _locked_memory(limit_of, root)
    yield _processes(limit_of, root)
    yield from _backlog(root, world_size)


def _open_files(limit_of: Limits, world_size: int) -> Finding:
    limit, most = limit_of(resource.RLIMIT_NOFILE)
    needed = _FILES_PER_RANK * world_size + _OTHER_FILES
    wanted = max(needed, _AMPLE_FILES)
    by_root = "" if _allows(most, wanted) else f"; root has to raise the hard limit of {most} first"
    advice = f"Raise the limit: ulimit -n {wanted}{by_root}"
    if not _allows(limit, needed):
        return problem(f"{limit} open files are allowed, and {world_size} ranks need {needed}", advice)
    if not _allows(limit, _AMPLE_FILES):
        ranks = (limit - _OTHER_FILES) // _FILES_PER_RANK
        return warning(f"{limit} open files are allowed, enough for some {ranks} ranks", advice)
    return ok(f"{_shown(limit)} open files are allowed")


def _locked_memory(limit_of: Limits, root: Path) -> Finding:
    limit, _ = limit_of(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory is not limited")
    text = f"{show_bytes(limit)} of memory may be locked"
    devices = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    if devices:
        return warning(
            f"{text}: NCCL and MPI cannot register their buffers at {', '.join(devices)}",
            "Remove the limit: ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity of slurmd",
        )
    return note(f"{text}; only InfiniBand and RoCE need more, and there are none")


def _processes(limit_of: Limits, root: Path) -> Finding:
    limit, _ = limit_of(resource.RLIMIT_NPROC)
    left = _processes_left(root)
    advice = "Raise the limit: docker run --pids-limit=-1, Kubernetes' podPidsLimit, TasksMax of systemd, or ulimit -u"
    if left is not None and left < _AMPLE_PROCESSES:
        text = f"the control group allows {left} more processes and threads"
        return (problem if left < _NEEDED_PROCESSES else warning)(text, advice)
    if os.geteuid() != 0 and not _allows(limit, _AMPLE_PROCESSES):  # the limit does not apply to root
        return warning(f"this user may have {limit} processes and threads", advice)
    in_group = "" if left is None else f", {left} more of them in this control group"
    return ok(f"{_shown(limit)} processes and threads are allowed{in_group}")


def _processes_left(root: Path) -> int | None:
    """Return how many further processes and threads the control groups allow; None where there is no limit."""
    allowed = []
    for group in control_groups("pids", root):
        limit, used = read_number(group / "pids.max"), read_number(group / "pids.current")
        if limit is not None and used is not None:
            allowed.append(max(0, limit - used))
    return min(allowed, default=None)


def _backlog(root: Path, world_size: int) -> Iterator[Finding]:
    most = read_number(root / "proc/sys/net/core/somaxconn")
    if most is None:
        return
    if most < max(_AMPLE_BACKLOG, world_size):
        yield warning(
            f"{most} connections may wait to be accepted (net.core.somaxconn): further ranks connect again, later",
            f"Raise it: sysctl net.core.somaxconn={max(4096, world_size)}",
        )
    else:
        yield ok(f"{most} connections may wait to be accepted (net.core.somaxconn)")


def _allows(limit: int, number: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= number


def _shown(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)
