"""The GPUs that each rank of a node sees: ``--gpus`` and ``--virtual-local-rank``.

::

    CUDA_VISIBLE_DEVICES of the user    4,5,6,7    GPU-aa,GPU-bb    not set: all GPUs of this host
    --gpus 0,2  (indices into it)       4,6                         0,2
    --virtual-local-rank                rank 0: 4   rank 1: 6       the same, and LOCAL_RANK=0

HIP_VISIBLE_DEVICES is treated like CUDA_VISIBLE_DEVICES where it is set. Without these flags nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from procgroup.cluster.accelerators import VISIBLE_DEVICES, visible_lists


class Devices(NamedTuple):
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


def choose(
    wanted: Sequence[str], ranks: int, environment: Mapping[str, str], present: int, *, has_one_each: bool
) -> Devices:
    """Select the GPUs of the ranks; ``wanted`` is the value of ``--gpus``, ``present`` the number of the host's GPUs.

    Raises ValueError for a GPU that does not exist, and where there are fewer GPUs than ranks.
    """
    named = visible_lists(environment)
    usable = named or {VISIBLE_DEVICES[0]: [str(number) for number in range(present)]}
    if not wanted and not has_one_each:
        return Devices(gpus=next(iter(usable.values())))
    if wanted:
        chosen = {name: [_entry(gpu, gpus, name, environment) for gpu in wanted] for name, gpus in usable.items()}
    else:
        chosen = usable
    count = min(map(len, chosen.values()))
    if count < ranks:
        there = "there is 1 GPU" if count == 1 else f"there are {count or 'no'} GPUs"
        raise ValueError(f"{ranks} ranks need a GPU each, but {there}{_where(wanted, environment, named)}")
    return Devices(next(iter(chosen.values())), chosen, has_one_each)


def replaced(devices: Devices, environment: Mapping[str, str], wanted: Sequence[str]) -> list[str]:
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
    if are_names and not any(_are_same(gpu, other) for other in usable):
        raise ValueError(f"--gpus names {gpu}, but {place} leaves it out")
    return gpu


def _are_same(one: str, other: str) -> bool:
    """Compare two UUIDs, of which either may be shortened."""
    return one.startswith(other) or other.startswith(one)


def _where(wanted: Sequence[str], environment: Mapping[str, str], named: Mapping[str, Sequence[str]]) -> str:
    if wanted:
        return f": --gpus is {','.join(wanted)}"
    if named:
        return ": " + " and ".join(f"{name} is {environment[name]!r}" for name in named)
    return " on this host; where they are not found, name them in CUDA_VISIBLE_DEVICES"
