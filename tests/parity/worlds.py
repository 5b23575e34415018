"""Worlds of torch and of procgroup ranks, which play the same cases and report what each rank saw."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from parity.played import Report
from parity.probes import PROBES
from seeded_cases import Case, CasePart, TorchPart, naming

from world import run


@dataclass(frozen=True)
class World:
    """Ranks of one library that play cases. ``transport`` is procgroup's; torch's ranks use Gloo."""

    size: int
    cases: Sequence[Case]
    library: str
    """"torch" or "procgroup"."""
    arrays: str = "torch"
    """"torch" or "numpy"."""
    transport: str = "shm"
    seconds: float = 60.0


def play(worlds: Sequence[World]) -> list[list[list[Report]]]:
    """Return for each world what each rank reports of each case."""
    return [_play(world, play_cases, world) for world in worlds]


def probe(number: int, library: str) -> list[str]:
    """Return what each of two ranks gets from the probe with this number."""
    return _play(World(2, (), library), play_probe, number, library)


def _play(world: World, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    environment = {"PROCGROUP_TRANSPORT": world.transport, "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        args = (folder, *arguments)
        return run(function, world.size, args=args, timeout=world.seconds, environment=environment, torch=True)


def play_cases(rank: int, size: int, folder: str, world: World) -> list[Report]:
    """Play cases one after the other, blocking and async by turns."""
    dist = _joined(rank, size, folder, world.library, world.seconds)
    part_of = TorchPart if world.arrays == "torch" else CasePart
    reports = []
    for number, case in enumerate(world.cases):
        with naming(f"{case}, {world.library} on {world.arrays}"):
            reports.append(_play_case(dist, part_of(case, rank, size), async_op=bool(number % 2)))
    _meet(folder, rank, size, "played")
    dist.destroy_process_group()
    return reports


def _play_case(dist: Any, part: CasePart, async_op: bool) -> Report:
    part.receives_from_any = False  # Gloo never ends such a receive of no elements
    part.is_flat = part.name.endswith("_single")  # torch looks at the shapes
    try:
        part.start(dist, async_op)
        part.wait()
    except (RuntimeError, ValueError, TypeError) as error:
        return Report(refused=f"{type(error).__name__}: {error}")
    return Report(wrong=part.wrong())


def play_probe(rank: int, size: int, folder: str, number: int, library: str) -> str:
    dist = _joined(rank, size, folder, library, 60.0)
    try:
        return PROBES[number].program(dist, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _joined(rank: int, size: int, folder: str, library: str, seconds: float) -> Any:
    """Return the library, in which this rank has joined."""
    import torch
    import torch.distributed

    import procgroup

    torch.set_num_threads(1)
    dist: Any = torch.distributed if library == "torch" else procgroup
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    _meet(folder, rank, size, "joined")  # or one that is done at once leaves before the other is there
    return dist


def _meet(folder: str, rank: int, size: int, what: str) -> None:
    """Wait as a barrier does. Gloo's own raises what calls before have raised, if those are still on their way."""
    Path(folder, f"{rank}.{what}").touch()
    while not all(Path(folder, f"{other}.{what}").exists() for other in range(size)):
        time.sleep(0.005)
