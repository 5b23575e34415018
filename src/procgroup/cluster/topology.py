"""The CPUs that this process may use: their cores, caches, sockets and NUMA nodes, from /sys/devices/system on Linux.

Words: a *CPU* is a logical processor, with a number of the kernel. A *core* has one CPU, or several with
hyper-threading. The cores of a *core complex* share their largest cache, mostly the L3. A *socket* has one or several
*NUMA nodes*, each with a part of the memory. Where a file is missing, as in many containers, all CPUs count as one
group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

CpuSet = frozenset[int]

SYSTEM = Path("sys/devices/system")
"""The directory of the CPUs, below the root directory."""


@dataclass(frozen=True)
class CpuTopology:
    """The topology of the CPUs in ``usable``, read from the directory ``system``."""

    usable: CpuSet
    system: Path

    @classmethod
    def of_this_process(cls, system: Path = Path("/") / SYSTEM) -> CpuTopology:
        """Return the topology of the CPUs that this process may run on."""
        return cls(frozenset(os.sched_getaffinity(0)), system)

    @cached_property
    def nodes(self) -> dict[int, CpuSet]:
        """The usable CPUs of each NUMA node that has any, by the node's number."""
        found = {}
        for directory in self.system.glob("node/node[0-9]*"):
            cpus = self.usable & _read_cpus(directory / "cpulist")
            if cpus:
                found[int(directory.name.removeprefix("node"))] = cpus
        if frozenset().union(*found.values()) != self.usable:
            return {0: self.usable}
        return dict(sorted(found.items()))

    @cached_property
    def cores(self) -> list[CpuSet]:
        """The usable CPUs of each core, ordered so that neighbours share a core complex and a NUMA node."""
        node_of = {cpu: node for node, cpus in self.nodes.items() for cpu in cpus}
        complex_of = {cpu: min(cpus) for cpus in self.core_complexes for cpu in cpus}
        cores = self._groups(lambda cpu: _read_cpus(self._directory(cpu) / "topology/thread_siblings_list"))
        return sorted(cores, key=lambda core: (node_of[min(core)], complex_of[min(core)], min(core)))

    @cached_property
    def core_complexes(self) -> list[CpuSet]:
        """The usable CPUs of each core complex, the lowest first."""
        return self._groups(self._sharing_largest_cache)

    @cached_property
    def sockets(self) -> list[CpuSet]:
        """The usable CPUs of each socket, the lowest first."""
        return self._groups(lambda cpu: _read_cpus(self._directory(cpu) / "topology/core_siblings_list") or self.usable)

    def _groups(self, sharing: Callable[[int], CpuSet]) -> list[CpuSet]:
        """Divide the usable CPUs into groups; ``sharing`` returns the group of a CPU."""
        groups, left = [], set(self.usable)
        while left:
            first = min(left)
            group = frozenset(left & sharing(first) | {first})
            groups.append(group)
            left -= group
        return groups

    def _sharing_largest_cache(self, cpu: int) -> CpuSet:
        caches = [
            (int(_read(directory / "level") or 0), _read_cpus(directory / "shared_cpu_list"))
            for directory in self._directory(cpu).glob("cache/index[0-9]*")
            if _read(directory / "type") != "Instruction"
        ]
        return max(caches, key=lambda cache: cache[0], default=(0, self.usable))[1]

    def _directory(self, cpu: int) -> Path:
        return self.system / f"cpu/cpu{cpu}"


def parse_cpus(text: str) -> CpuSet:
    """Read a list of CPUs in Linux's form, such as ``0-3,8``. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        if not re.fullmatch(r"\d+(-\d+)?", part):
            raise ValueError(f"expected CPUs such as 0-3,8, got {text!r}")
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPUs in the form that ``parse_cpus`` reads."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _read_cpus(path: Path) -> CpuSet:
    return parse_cpus(_read(path))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
