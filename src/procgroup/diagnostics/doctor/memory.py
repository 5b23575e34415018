"""Shared memory between the ranks of this host: arenas, /dev/shm, head-room, and single copies between processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from procgroup.diagnostics.doctor import single_copy
from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning
from procgroup.diagnostics.doctor.system_files import (
    control_groups,
    first_number,
    read_entry,
    read_number,
    read_text,
    show_bytes,
)

_MIB = 1 << 20
_GIB = 1 << 30
# The buffers of one rank take some MiB; arrays of the program come on top of that.
_NEEDED_HEAD_ROOM = 64 * _MIB
_AMPLE_HEAD_ROOM = 512 * _MIB
# Docker gives 64 MiB. NCCL takes up to 33 MiB for each pair of GPUs, and PyTorch's DataLoader a batch for each worker.
_AMPLE_SHM = _GIB


class Space(NamedTuple):
    """The size of a file system, and what is free there, in bytes."""

    size: int
    free: int


def check(
    root: Path = Path("/"),
    arena_problem: Callable[[], str] | None = None,
    shm: Callable[[Path], Space | None] | None = None,
    copy_problem: Callable[[], str] | None = None,
) -> Iterator[Finding]:
    """Yield findings about memory. The functions try things that cannot be read from files; tests replace them."""
    yield _arena((arena_problem or try_arena)())
    yield _shm((shm or space_of)(root / "dev/shm"))
    yield from _head_room(root)
    yield _single_copy((copy_problem or single_copy.problem)(), root)


def try_arena() -> str:
    """Make an arena, as a rank does, and free it; return why that failed, or ""."""
    try:
        from procgroup._native import Engine
    except ImportError:
        return "procgroup's native module cannot be loaded"
    engine = Engine(0, 1, False, True)
    try:
        return engine.arena_problem
    finally:
        engine.shutdown()


def space_of(directory: Path) -> Space | None:
    """Return the space of the file system of a directory; None without that directory."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def _arena(reason: str) -> Finding:
    if not reason:
        return ok("an arena can be made: the ranks of this host can share memory")
    return warning(
        f"no arena can be made ({reason}): the ranks of this host use TCP between them",
        "Allow memfd_create, fallocate and more memory to this process (ulimit -v, the container's seccomp profile)",
    )


def _shm(space: Space | None) -> Finding:
    use = "NCCL, MPI and PyTorch's DataLoader use it; procgroup does not"
    more = "Make it larger: docker run --shm-size=8g, in Kubernetes an emptyDir with medium: Memory, or remount it"
    if space is None:
        return warning(f"there is no /dev/shm ({use})", "Mount a tmpfs at /dev/shm")
    if space.free < min(_AMPLE_SHM, space.size // 8) or space.size < _AMPLE_SHM:
        return warning(f"/dev/shm has {show_bytes(space.size)}, {show_bytes(space.free)} of it free ({use})", more)
    return ok(f"/dev/shm has {show_bytes(space.size)}, {show_bytes(space.free)} of it free")


def _head_room(root: Path) -> Iterator[Finding]:
    """Yield a finding about the memory that this process can still get: from its control groups, and from the host."""
    in_groups = _group_head_room(root)
    kib = read_entry(root / "proc/meminfo", "MemAvailable")
    available = {"control group": in_groups, "host": None if kib is None else kib * 1024}
    known = {where: size for where, size in available.items() if size is not None}
    if not known:
        yield note("this system does not show how much memory is available")
        return
    where = min(known, key=lambda name: known[name])
    text = f"{show_bytes(known[where])} of memory are available to this process, by its {where}"
    advice = "Free memory, or raise the limit of the container or job"
    if known[where] < _NEEDED_HEAD_ROOM:
        yield problem(f"only {text}: shared memory cannot be reserved", advice)
    elif known[where] < _AMPLE_HEAD_ROOM:
        yield warning(f"only {text}", advice)
    else:
        yield ok(text)


def _group_head_room(root: Path) -> int | None:
    """Return what the memory limits of this process's control groups still allow; None where there is no limit."""
    allowed = []
    for group in control_groups("memory", root):
        limit = first_number((group / "memory.max", group / "memory.limit_in_bytes"))
        used = first_number((group / "memory.current", group / "memory.usage_in_bytes"))
        if limit is not None and used is not None:
            # The kernel drops cached files before it refuses memory.
            cached = read_entry(group / "memory.stat", "total_inactive_file")
            cached = read_entry(group / "memory.stat", "inactive_file") if cached is None else cached
            allowed.append(max(0, limit - used + (cached or 0)))
    return min(allowed, default=None)


def _single_copy(reason: str, root: Path) -> Finding:
    if not reason:
        return ok("processes may read each other's memory: large arrays are copied once between ranks")
    scope = read_number(root / "proc/sys/kernel/yama/ptrace_scope")
    text = f"processes may not read each other's memory ({reason}): large arrays are copied twice between ranks"
    if scope:
        return warning(f"{text}; ptrace_scope is {scope}", "Allow it: sysctl kernel.yama.ptrace_scope=0")
    seccomp = read_entry(root / "proc/self/status", "Seccomp")
    where = "docker run --cap-add=SYS_PTRACE, or a seccomp profile with process_vm_readv"
    is_filtered = f" (system calls are filtered, Seccomp {seccomp})" if seccomp else ""
    system = read_text(root / "proc/version")
    if "gVisor" in system:
        return note(f"{text}: gVisor has no process_vm_readv")
    return warning(f"{text}{is_filtered}", f"Allow process_vm_readv in the container: {where}")
