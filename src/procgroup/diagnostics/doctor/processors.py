"""The CPUs that this process may use: affinity, control-group quota, hyper-threads, and OMP_NUM_THREADS."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from procgroup.cluster.cores import quota_of
from procgroup.cluster.topology import SYSTEM, Topology, format_cpus, parse_cpus
from procgroup.diagnostics.doctor.findings import Finding, note, ok, warning
from procgroup.diagnostics.doctor.system_files import control_groups, read_text

_LISTED_CPUS = 60
"""The longest list of CPUs that is shown, in characters."""


def check(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/"), usable: frozenset[int] | None = None
) -> Iterator[Finding]:
    """Yield findings about processors. ``usable`` are the CPUs of this process's affinity."""
    cpus = frozenset(os.sched_getaffinity(0)) if usable is None else usable
    quota = quota_of(control_groups("cpu", root))
    yield _affinity(cpus, root)
    cores = len(Topology(cpus, root / SYSTEM).cores)
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
            f"OMP_NUM_THREADS={text!r} is no number of threads", "Unset it, or set it to a number of at least 1"
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
