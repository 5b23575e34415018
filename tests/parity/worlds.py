"""Worlds of torch and of procgroup ranks, forked from one process that has imported torch once.

`play` starts that process, which is this file run as a program: for each world that it is asked for it forks the
ranks, each of which plays the cases and leaves its reports in a file. Importing torch takes longer than all else.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from parity.probes import PROBES
from parity.program import play_cases
from seeded_cases import Case, CasePart, TorchPart


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


@dataclass(frozen=True)
class ProbeWorld:
    """Two ranks of one library that play the probe with this number."""

    number: int
    library: str
    size = 2
    arrays = "torch"
    transport = "shm"
    seconds = 60.0


AnyWorld = World | ProbeWorld


def play(worlds: Sequence[AnyWorld]) -> list[list[list[Any]]]:
    """Return for each world what each rank reports of each case; raise AssertionError with all ranks' output."""
    from world import run_command

    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        Path(folder, "worlds").write_bytes(pickle.dumps(list(worlds)))
        limit = sum(world.seconds for world in worlds) + 60
        tests = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        done = run_command([sys.executable, __file__, folder], timeout=limit, environment={"PYTHONPATH": path})
        assert done.returncode == 0, done.stdout + done.stderr
        return [
            [pickle.loads(Path(folder, f"{number}.{rank}").read_bytes()) for rank in range(world.size)]
            for number, world in enumerate(worlds)
        ]


def main(folder: str) -> int:
    import torch
    import torch.distributed

    worlds: list[AnyWorld] = pickle.loads(Path(folder, "worlds").read_bytes())
    for number, world in enumerate(worlds):
        children = []
        for rank in range(world.size):
            if (child := os.fork()) == 0:
                _be_rank(torch, folder, number, world, rank)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            print(f"world {number}, {world.library} on {world.arrays}, {world.size} ranks: statuses {statuses}")
            return 1
    return 0


def _be_rank(torch: Any, folder: str, number: int, world: AnyWorld, rank: int) -> None:
    """Play and leave, never to return. A rank that takes too long shows its stacks and ends."""
    faulthandler.dump_traceback_later(world.seconds, exit=True)
    place = [""]
    try:
        torch.set_num_threads(1)
        dist = (
            _join_torch(folder, number, world, rank)
            if world.library == "torch"
            else _join_procgroup(folder, number, world, rank)
        )
        # Or one that is done at once leaves before the other is there.
        _meet(folder, number, rank, world.size, "joined")
        if isinstance(world, ProbeWorld):
            _leave_reports(folder, number, rank, [_probe(dist, rank, world.number)])
            os._exit(0)  # without leaving the group, which may be broken
        part_of = TorchPart if world.arrays == "torch" else CasePart
        reports = play_cases(dist, part_of, rank, world.size, world.cases, lambda text: place.__setitem__(0, text))
        _leave_reports(folder, number, rank, reports)
        if world.library == "torch":
            _meet(folder, number, rank, world.size, "played")
        else:
            dist.barrier()
        dist.destroy_process_group()
        os._exit(0)
    except BaseException:
        print(f"rank {rank} of {world.size} ({world.library}), in {place[0]}", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _leave_reports(folder: str, number: int, rank: int, reports: Sequence[Any]) -> None:
    Path(folder, f"{number}.{rank}").write_bytes(pickle.dumps(reports))


def _meet(folder: str, number: int, rank: int, size: int, what: str) -> None:
    """Wait as a barrier does. Gloo's own raises what calls before have raised, if those are still on their way."""
    Path(folder, f"{number}.{rank}.{what}").touch()
    while not all(Path(folder, f"{number}.{other}.{what}").exists() for other in range(size)):
        time.sleep(0.005)


def _probe(dist: Any, rank: int, number: int) -> str:
    try:
        return PROBES[number].program(dist, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _join_torch(folder: str, number: int, world: AnyWorld, rank: int) -> Any:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/{number}.store", world.size)
    limit = timedelta(seconds=world.seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.size, timeout=limit)
    return dist


def _join_procgroup(folder: str, number: int, world: AnyWorld, rank: int) -> Any:
    os.environ["PROCGROUP_TRANSPORT"] = world.transport
    import procgroup as dist

    store = dist.FileStore(f"{folder}/{number}.store", world.size)
    dist.init_process_group(store=store, rank=rank, world_size=world.size, timeout=world.seconds)
    return dist


if __name__ == "__main__":
    from parity import worlds as this  # what is pickled are the classes of parity.worlds

    sys.exit(this.main(sys.argv[1]))
