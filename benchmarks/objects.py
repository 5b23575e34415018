"""How fast objects move beside one array of their size: dicts of float32 arrays, 2 ranks, all in turn.

python benchmarks/objects.py [--mebibytes 256] [--arrays 1,8,200,2000] [--rounds 15] [--tcp]

raw is broadcast or all_gather of one array into arrays that the receivers have and have used before; fresh is the
same into arrays made for the call, which is how objects come. The receiver drops each object before the next call.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import procgroup as dist

RANKS = 2
OPERATIONS = ("broadcast", "all_gather")
Calls = dict[str, Callable[[], Any]]


def calls_of(op: str, mebibytes: int, number: int) -> Calls:
    """Return what takes turns. Each returns what it received, which lives until the time is taken."""
    count = (mebibytes << 20) // 4
    mine = np.ones(count, np.float32)
    outputs = [np.ones(count, np.float32) for _ in range(RANKS)]
    is_root = dist.get_rank() == 0

    def raw(places: list[np.ndarray]) -> Any:
        if op == "all_gather":
            dist.all_gather(places, mine)
        else:
            dist.broadcast(mine if is_root else places[0], src=0)
        return places

    def fresh() -> Any:
        received = RANKS if op == "all_gather" else 1 - is_root
        return raw([np.empty(count, np.float32) for _ in range(received)])

    def send(value: Any) -> Any:
        if op == "all_gather":
            received = [None] * RANKS
            dist.all_gather_object(received, value)
        else:
            received = [value if is_root else None]
            dist.broadcast_object_list(received, src=0)
        return received

    value = {f"layer.{index}": np.ones(count // number, np.float32) for index in range(number)}
    return {"raw": lambda: raw(outputs), "fresh": fresh, "object": lambda: send(value)}


def time_calls(calls: Calls, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each call in each round, of the slower rank; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            received = call()
            took = np.array([time.perf_counter() - began])
            del received
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[name].append(took[0] * 1e3)
    return {name: taken[1:] for name, taken in times.items()}


def rank_main(rank: int, path: str, arguments: argparse.Namespace, report: Connection) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group(init_method=f"file://{path}", rank=rank, world_size=RANKS)
    for op in OPERATIONS:
        for number in arguments.arrays:
            times = time_calls(calls_of(op, arguments.mebibytes, number), arguments.rounds)
            if rank == 0:
                report.send((op, number, times))
    dist.destroy_process_group()


def show(op: str, number: int, times: dict[str, list[float]]) -> None:
    for kind, of in (("median", statistics.median), ("quartile", lower_quartile), ("minimum", min)):
        raw, fresh, taken = (of(times[name]) for name in ("raw", "fresh", "object"))
        print(
            f"{op:11}{number:6} arrays  {kind:9}raw {raw:7.1f} ms  fresh {fresh:7.1f} ms  object {taken:7.1f} ms  "
            f"raw / object {raw / taken:5.2f}",
            flush=True,
        )


def lower_quartile(times: list[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="of one rank's object")
    parser.add_argument("--arrays", default="1,8,200,2000", help="into how many arrays they are cut")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tcp", action="store_true", help="do not use shared memory")
    arguments = parser.parse_args()
    arguments.arrays = [int(number) for number in arguments.arrays.split(",")]
    if arguments.tcp:
        os.environ["PROCGROUP_TRANSPORT"] = "tcp"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with TemporaryDirectory() as directory:
        path = str(Path(directory) / "store")
        ranks = [context.Process(target=rank_main, args=(rank, path, arguments, theirs)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        theirs.close()
        for _ in range(len(OPERATIONS) * len(arguments.arrays)):
            show(*ours.recv())
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
