"""Which CPUs each rank of a node runs on: the values of ``--numa-binding``, torchrun's and ``cores``.

::

    node          all usable CPUs of the rank's NUMA node
    socket        all usable CPUs of the socket that contains this node
    exclusive     cores of this node that no other rank uses
    core-complex  one core complex (cores with a shared L3 cache) of this node; the node's ranks get different ones
    cores         a part of all usable cores of the host; neighbouring ranks get neighbouring cores

A rank's NUMA node is the one next to its GPU. Where that is unknown, the usable cores are divided among the ranks in
order, and a rank's node is the one that contains the middle core of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from procgroup.cluster.topology import CpuSet, CpuTopology, format_cpus


class Binding(NamedTuple):
    """The CPUs of each local rank; ``note`` is a line for the user where the host has too few for the flag."""

    cpus: tuple[CpuSet, ...]
    note: str = ""

    def sharers(self, local_rank: int) -> int:
        """Return how many ranks share the CPUs of this rank, itself included."""
        return self.cpus.count(self.cpus[local_rank])


def bind(by: str, ranks: int, topology: CpuTopology, gpu_nodes: Sequence[int | None] = ()) -> Binding:
    """Return the CPUs of each of ``ranks`` ranks; ``gpu_nodes`` are the NUMA nodes of their GPUs (None: unknown)."""
    if by == "cores":
        return _with_note(by, [_part(topology.cores, rank, ranks) for rank in range(ranks)], topology)
    homes = _home_nodes(ranks, topology, gpu_nodes)
    cpus = []
    for rank, home in enumerate(homes):
        place, of_node = homes[:rank].count(home), homes.count(home)
        cpus.append(_of_node(by, topology, topology.nodes[home], place, of_node))
    return _with_note(by, cpus, topology)


def _home_nodes(ranks: int, topology: CpuTopology, gpu_nodes: Sequence[int | None]) -> list[int]:
    node_of_core = [node for core in topology.cores for node, cpus in topology.nodes.items() if min(core) in cpus]
    spread = [node_of_core[(2 * rank + 1) * len(node_of_core) // (2 * ranks)] for rank in range(ranks)]
    beside = [*gpu_nodes, *[None] * ranks][:ranks]
    return [near if near in topology.nodes else other for near, other in zip(beside, spread, strict=True)]


def _of_node(by: str, topology: CpuTopology, node: CpuSet, place: int, ranks: int) -> CpuSet:
    """Return the CPUs of rank number ``place`` of the ``ranks`` ranks on one NUMA node."""
    if by == "socket":
        return frozenset().union(*(socket for socket in topology.sockets if socket & node))
    if by == "exclusive":
        return _part([core for core in topology.cores if min(core) in node], place, ranks)
    if by == "core-complex":
        complexes = [cpus & node for cpus in topology.core_complexes if cpus & node]
        largest_first = sorted(complexes, key=len, reverse=True)
        return largest_first[place % len(complexes)]
    return node


def _part(cores: Sequence[CpuSet], place: int, parts: int) -> CpuSet:
    """Return one of ``parts`` equal parts, of which the first may have one core more; with too few cores, one core."""
    if len(cores) < parts:
        return cores[place * len(cores) // parts]
    size, larger = divmod(len(cores), parts)
    first = place * size + min(place, larger)
    return frozenset().union(*cores[first : first + size + (place < larger)])


def _with_note(by: str, cpus: Sequence[CpuSet], topology: CpuTopology) -> Binding:
    if by in ("node", "socket"):
        is_whole = all(share == topology.usable for share in cpus)
        where = f"the usable CPUs {format_cpus(topology.usable)} are of one {'NUMA node' if by == 'node' else 'socket'}"
        return Binding(tuple(cpus), f"--numa-binding {by} has no effect: {where}" if is_whole else "")
    shared = {share: [rank for rank, other in enumerate(cpus) if other == share] for share in cpus}
    several = [
        f"ranks {format_cpus(ranks)} share CPU{'s' * (len(share) > 1)} {format_cpus(share)}"
        for share, ranks in shared.items()
        if len(ranks) > 1
    ]
    what = "core complexes" if by == "core-complex" else "cores"
    return Binding(tuple(cpus), f"--numa-binding {by} has too few {what}: {'; '.join(several)}" if several else "")
