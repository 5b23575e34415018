"""The GPUs, the CPUs and the number of threads of each rank of this node, the same in every round.

``--gpus`` and ``--virtual-local-rank`` choose the GPUs::

    CUDA_VISIBLE_DEVICES of the user    4,5,6,7    GPU-aa,GPU-bb    not set: all GPUs of this host
    --gpus 0,2  (indices into it)       4,6                         0,2
    --virtual-local-rank                rank 0: 4   rank 1: 6       the same, and LOCAL_RANK=0

HIP_VISIBLE_DEVICES is treated like CUDA_VISIBLE_DEVICES where it is set. Without these flags nothing changes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from procgroup.cluster.control_group import cores_by_affinity, usable_cores

if TYPE_CHECKING:
    from procgroup.cluster.topology import CpuSet
    from procgroup.launch.ranks.binding import Binding


class RankDevices(NamedTuple):
    """The GPUs that the ranks of a node see.

    ``gpus`` are the GPUs as CUDA_VISIBLE_DEVICES names them, in the order of the local ranks. ``variables`` are the
    lists that the launcher sets, empty where it changes nothing.
    """

    gpus: Sequence[str] = ()
    variables: Mapping[str, Sequence[str]] = MappingProxyType({})
    has_one_each: bool = False

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables that select one rank's GPUs."""
        if self.has_one_each:
            return {"LOCAL_RANK": "0", **{name: named[local_rank] for name, named in self.variables.items()}}
        return {name: ",".join(named) for name, named in self.variables.items()}


def choose_devices(
    wanted: Sequence[str], ranks: int, environment: Mapping[str, str], present: int, *, has_one_each: bool
) -> RankDevices:
    """Select the GPUs of the ranks; ``wanted`` is the value of ``--gpus``, ``present`` the number of the host's GPUs.

    Raises ValueError for a GPU that does not exist, and where there are fewer GPUs than ranks.
    """
    from procgroup.cluster.accelerators import VISIBLE_DEVICES, visible_lists

    named = visible_lists(environment)
    usable = named or {VISIBLE_DEVICES[0]: [str(number) for number in range(present)]}
    if not wanted and not has_one_each:
        return RankDevices(gpus=next(iter(usable.values())))
    if wanted:
        chosen = {name: [_entry(gpu, gpus, name, environment) for gpu in wanted] for name, gpus in usable.items()}
    else:
        chosen = usable
    count = min(map(len, chosen.values()))
    if count < ranks:
        there = "there is 1 GPU" if count == 1 else f"there are {count or 'no'} GPUs"
        raise ValueError(f"{ranks} ranks need a GPU each, but {there}{_where(wanted, environment, named)}")
    return RankDevices(next(iter(chosen.values())), chosen, has_one_each)


def replaced_variables(devices: RankDevices, environment: Mapping[str, str], wanted: Sequence[str]) -> list[str]:
    """Return a line for each variable of the user whose value changes for the ranks."""
    flag = f"--gpus {','.join(wanted)}" if wanted else "--virtual-local-rank"
    how = "one of them per rank" if devices.has_one_each else "for all ranks"
    return [
        f"{name}={environment[name]} becomes {','.join(gpus)}, {how} ({flag})"
        for name, gpus in devices.variables.items()
        if name in environment and (devices.has_one_each or environment[name] != ",".join(gpus))
    ]


def _entry(gpu: str, usable: Sequence[str], variable: str, environment: Mapping[str, str]) -> str:
    """Return one GPU of ``--gpus`` as the ranks' variable names it."""
    place = f"{variable}={environment[variable]}" if variable in environment else "this host"
    if gpu.isdigit():
        if int(gpu) >= len(usable):
            numbers = f"has only the numbers 0 to {len(usable) - 1}" if usable else "has none"
            raise ValueError(f"--gpus names GPU {gpu}, but {place} {numbers}")
        return usable[int(gpu)]
    are_names = bool(usable) and not any(other.isdigit() for other in usable)
    # Of two UUIDs that are compared, either may be shortened.
    if are_names and not any(gpu.startswith(other) or other.startswith(gpu) for other in usable):
        raise ValueError(f"--gpus names {gpu}, but {place} leaves it out")
    return gpu


def _where(wanted: Sequence[str], environment: Mapping[str, str], named: Mapping[str, Sequence[str]]) -> str:
    if wanted:
        return f": --gpus is {','.join(wanted)}"
    if named:
        return ": " + " and ".join(f"{name} is {environment[name]!r}" for name in named)
    return " on this host; where they are not found, name them in CUDA_VISIBLE_DEVICES"


class Placement(NamedTuple):
    """The placement of a node's local ranks. ``cpus`` is None where they are unbound; ``notes`` are lines to print."""

    devices: RankDevices
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
    threads = [max(1, usable_cores() // ranks)] * ranks
    if not (options.gpus or options.virtual_local_rank or options.numa_binding):
        return Placement(RankDevices(), threads, None, [])
    from procgroup.cluster import accelerators  # needed for these flags only

    devices = _devices(options, environment, accelerators.host_gpus(root))
    notes = replaced_variables(devices, environment, options.gpus)
    if not options.numa_binding:
        return Placement(devices, threads, None, notes)
    from procgroup.cluster.topology import SYSTEM, CpuTopology
    from procgroup.launch.ranks.binding import bind

    topology = CpuTopology.of_this_process(root / SYSTEM)
    nodes = [accelerators.numa_node(gpu, root) for gpu in devices.gpus]
    binding = bind(options.numa_binding, ranks, topology, nodes)
    notes += [binding.note] if binding.note else []
    return Placement(devices, [_threads(binding, rank) for rank in range(ranks)], binding.cpus, notes)


def _devices(options: argparse.Namespace, environment: Mapping[str, str], present: int) -> RankDevices:
    try:
        return choose_devices(
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
