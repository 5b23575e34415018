"""Hosts that do not exist: what Linux would show of their CPUs and GPUs, written below a folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from procgroup.cluster.topology import SYSTEM, CpuTopology, format_cpus


class Cpu(NamedTuple):
    """One CPU, and the numbers of the core, the core complex, the NUMA node and the socket that it is part of."""

    number: int
    core: int
    core_complex: int
    node: int
    socket: int


def server() -> list[Cpu]:
    """Two sockets with two NUMA nodes each, every node of two core complexes of two cores, every core of two CPUs."""
    return [Cpu(number, core := number % 16, core // 2, core // 4, core // 8) for number in range(32)]


def interleaved() -> list[Cpu]:
    """Two sockets of four cores, whose numbers alternate between the sockets, as on many servers."""
    return [Cpu(number, number, number % 2, number % 2, number % 2) for number in range(8)]


def write_topology(root: Path, cpus: Iterable[Cpu], usable: Iterable[int] | None = None) -> CpuTopology:
    """Write a host's CPUs; return their topology for a process that may use all of them, or ``usable``."""
    cpus = list(cpus)
    system = root / SYSTEM
    for cpu in cpus:
        directory = system / f"cpu/cpu{cpu.number}"
        _write(directory / "topology/thread_siblings_list", _alike(cpus, cpu, "core"))
        _write(directory / "topology/core_siblings_list", _alike(cpus, cpu, "socket"))
        _write_caches(directory / "cache", _alike(cpus, cpu, "core"), _alike(cpus, cpu, "core_complex"))
    nodes = defaultdict(list)
    for cpu in cpus:
        nodes[cpu.node].append(cpu.number)
    for node, numbers in nodes.items():
        _write(system / f"node/node{node}/cpulist", format_cpus(numbers))
    return CpuTopology(frozenset(usable if usable is not None else (cpu.number for cpu in cpus)), system)


def write_gpus(root: Path, nodes: Mapping[str, int]) -> None:
    """Write NVIDIA GPUs: their PCI addresses, and the NUMA node beside each. The UUID of the third is GPU-2-uuid."""
    for number, (address, node) in enumerate(nodes.items()):
        _write(root / f"dev/nvidia{number}", "")
        _write(
            root / f"proc/driver/nvidia/gpus/{address}/information", f"Model: \t X\nGPU UUID: \t GPU-{number}-uuid\n"
        )
        _write(root / f"sys/bus/pci/devices/{address}/numa_node", str(node))


def _alike(cpus: Iterable[Cpu], cpu: Cpu, what: str) -> str:
    return format_cpus(other.number for other in cpus if getattr(other, what) == getattr(cpu, what))


def _write_caches(directory: Path, core: str, core_complex: str) -> None:
    caches = [("1", "Data", core), ("1", "Instruction", core), ("2", "Unified", core), ("3", "Unified", core_complex)]
    for index, (level, kind, sharing) in enumerate(caches):
        _write(directory / f"index{index}/level", level)
        _write(directory / f"index{index}/type", kind)
        _write(directory / f"index{index}/shared_cpu_list", sharing)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
