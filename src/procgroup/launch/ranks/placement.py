"""The GPUs, the CPUs and the number of threads of each rank of this node, the same in every round."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from procgroup.cluster import accelerators
from procgroup.cluster.cores import cores_by_affinity, usable_cores
from procgroup.launch.ranks import devices
from procgroup.launch.ranks.devices import Devices

if TYPE_CHECKING:
    from procgroup.cluster.topology import CpuSet
    from procgroup.launch.ranks.binding import Binding


class Placement(NamedTuple):
    """The placement of a node's local ranks. ``cpus`` is None where they are unbound; ``notes`` are lines to print."""

    devices: Devices
    threads: Sequence[int]
    cpus: Sequence[CpuSet] | None = None
    notes: Sequence[str] = ()

    @property
    def threads_text(self) -> str:
        """The numbers of threads, as one number or a range."""
        least, most = min(self.threads), max(self.threads)
        return str(least) if least == most else f"{least} to {most}"


def place(options: argparse.Namespace, root: Path = Path("/")) -> Placement:
    """Place the ranks as the parsed flags say. Flags that this host cannot satisfy end the program with status 2.

    ``root`` is the directory that holds ``dev``, ``proc`` and ``sys``.
    """
    parser: argparse.ArgumentParser = options.parser
    try:
        return _place(options, os.environ, root)
    except ValueError as error:
        parser.error(str(error))


def _place(options: argparse.Namespace, environment: Mapping[str, str], root: Path) -> Placement:
    ranks: int = options.nproc_per_node
    chosen = _devices(options, environment, accelerators.host_gpus(root))
    notes = devices.replaced(chosen, environment, options.gpus)
    if not options.numa_binding:
        return Placement(chosen, [max(1, usable_cores() // ranks)] * ranks, None, notes)
    from procgroup.cluster.topology import SYSTEM, Topology  # needed for this flag only
    from procgroup.launch.ranks.binding import bind

    topology = Topology.of_this_process(root / SYSTEM)
    nodes = [accelerators.numa_node(gpu, root) for gpu in chosen.gpus]
    binding = bind(options.numa_binding, ranks, topology, nodes)
    notes += [binding.note] if binding.note else []
    return Placement(chosen, [_threads(binding, rank) for rank in range(ranks)], binding.cpus, notes)


def _devices(options: argparse.Namespace, environment: Mapping[str, str], present: int) -> Devices:
    try:
        return devices.choose(
            options.gpus, options.nproc_per_node, environment, present, has_one_each=options.virtual_local_rank
        )
    except ValueError as error:
        sources = [options.sources[name] for name in ("nproc_per_node", "gpus", "virtual_local_rank")]
        given = ", ".join(source for source in sources if source != "default")
        raise ValueError(f"{error} (set by {given})") from error


def _threads(binding: Binding, local_rank: int) -> int:
    """Return the number of threads of a bound rank. A CPU quota of the control group is divided evenly."""
    share = len(binding.cpus[local_rank]) // binding.sharers(local_rank)
    is_limited = usable_cores() < cores_by_affinity()
    return max(1, min(share, usable_cores() // len(binding.cpus)) if is_limited else share)
