"""The limits of this process: CPUs and threads; open files, locked memory, processes and connections to accept."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from procgroup.cluster.control_group import quota_of
from procgroup.cluster.topology import SYSTEM, CpuTopology, format_cpus, parse_cpus
from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning
from procgroup.diagnostics.doctor.system_files import control_groups, read_number, read_text, show_bytes

Limits = Callable[[int], tuple[int, int]]

# A rank has a descriptor for each other rank, and the process that hosts the store has one more for each rank.
_FILES_PER_RANK = 3
_OTHER_FILES = 64
_AMPLE_FILES = 1024
# A rank has a few threads of its own; the thread pools of NumPy and PyTorch have one for each CPU.
_NEEDED_PROCESSES = 16
_AMPLE_PROCESSES = 256
_AMPLE_BACKLOG = 128


_LISTED_CPUS = 60
"""The longest list of CPUs that is shown, in characters."""


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


def check_processors(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/"), usable: frozenset[int] | None = None
) -> Iterator[Finding]:
    """Yield findings about processors. ``usable`` are the CPUs of this process's affinity."""
    cpus = frozenset(os.sched_getaffinity(0)) if usable is None else usable
    quota = quota_of(control_groups("cpu", root))
    yield _affinity(cpus, root)
    cores = len(CpuTopology(cpus, root / SYSTEM).cores)
    if cores < len(cpus):
        yield note(f"{len(cpus)} CPUs are {cores} cores with hyper-threads; ranks on one core share its units")
    if quota is not None and quota < len(cpus):
        yield _quota(quota)
    threads_allowed = len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))
    yield _threads(environment, threads_allowed)
    yield from _load(root, len(cpus))


def _affinity(cpus: frozenset[int], root: Path) -> Finding:
    existing = _online(root) or cpus
    listed = format_cpus(cpus)
    which = f" ({listed})" if len(listed) <= _LISTED_CPUS else ""
    if len(cpus) < len(existing):
        return ok(f"{len(cpus)} of {len(existing)} CPUs are usable, by affinity{which}")
    return ok(f"{len(cpus)} CPUs, all of them usable")


def _online(root: Path) -> frozenset[int]:
    try:
        return parse_cpus(read_text(root / SYSTEM / "cpu/online"))
    except ValueError:
        return frozenset()


def _quota(quota: float) -> Finding:
    text = f"the control group's quota is {quota:g} CPUs"
    if quota >= 1:
        return note(f"{text}: {int(quota)} ranks that are always busy can run at full speed")
    return warning(
        f"{text}: a busy process is stopped in every period",
        "Give this container or job at least one CPU for each rank (docker run --cpus, Kubernetes' limits.cpu)",
    )


def _load(root: Path, cpus: int) -> Iterator[Finding]:
    """Yield a note where other programs run: speeds that are measured meanwhile are lower, and vary."""
    words = read_text(root / "proc/loadavg").split()
    if words and float(words[0]) > cpus:
        yield note(f"the load average is {words[0]} on {cpus} usable CPUs: other programs run, and slow ranks down")


def _threads(environment: Mapping[str, str], usable: int) -> Finding:
    text = environment.get("OMP_NUM_THREADS", "")
    if not text:
        return ok("OMP_NUM_THREADS is not set; procgroup run sets it to the usable CPUs divided by the ranks")
    if not re.fullmatch(r"\s*0*[1-9]\d*(\s*,\s*0*[1-9]\d*)*\s*", text, re.ASCII):
        return warning(
            f"OMP_NUM_THREADS={text!r} is not a number of threads", "Unset it, or set it to a number of at least 1"
        )
    threads = int(text.split(",")[0])
    ranks_text = environment.get("LOCAL_WORLD_SIZE", "")
    ranks = int(ranks_text) if ranks_text.isascii() and ranks_text.isdigit() and int(ranks_text) > 0 else 1
    if threads * ranks > usable:
        of_ranks = f" for each of {ranks} ranks" if ranks > 1 else ""
        return warning(
            f"OMP_NUM_THREADS={threads}{of_ranks}, but {usable} CPUs are usable: threads wait for each other",
            f"Unset OMP_NUM_THREADS, or set it to {max(1, usable // ranks)}",
        )
    return ok(f"OMP_NUM_THREADS={threads}")
