"""What the forms of one call cost beside each other: plain and symmetric arrays, lists, trees, numbers, objects.

python benchmarks/forms.py [--rounds 100] [--seconds 0.002]

Two ranks, a core each where there are two. The forms of a group take turns; a time is that of the slower rank per call.
The fastest round shows what a form costs where nothing disturbs it, the median what it costs on this machine now.
docs/fast.md has the figures, and says what follows from them; docs/jax.md has those of JAX.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from procgroup import functional

RANKS = 2
SMALL_ARRAYS = 200
LARGE_BYTES = 16 << 20
Forms = dict[str, Callable[[], Any]]


def exchange(array: Any) -> None:
    """Send an array there and back, which is two messages."""
    if dist.get_rank() == 0:
        dist.send(array, 1)
        dist.recv(array, 1)
    else:
        dist.recv(array, 0)
        dist.send(array, 0)


def forms_of_8_bytes() -> Forms:
    array, objects = np.ones(1), [None] * RANKS
    peer = 1 - dist.get_rank()
    return {
        "`dist.all_reduce(array)`": lambda: dist.all_reduce(array),
        "`functional.all_reduce(array)`": lambda: functional.all_reduce(array),
        "`functional.all_reduce(3.0)`": lambda: functional.all_reduce(3.0),
        "`functional.all_reduce(3)`": lambda: functional.all_reduce(3),
        "`functional.all_gather(3.0)`": lambda: functional.all_gather(3.0),
        "`functional.sendrecv(array, peer, peer)`": lambda: functional.sendrecv(array, peer, peer),
        "`dist.all_gather_object(things, (1, 2.0))`": lambda: dist.all_gather_object(objects, (1, 2.0)),
        "`dist.broadcast_object_list([(1, 2.0)])`": lambda: dist.broadcast_object_list([(1, 2.0)]),
    }


def forms_of_many_small_arrays() -> Forms:
    arrays = [np.zeros(16, np.float32) for _ in range(SMALL_ARRAYS)]
    tree = {f"layer {index}": array for index, array in enumerate(arrays)}
    whole = np.zeros(16 * SMALL_ARRAYS, np.float32)

    def loop() -> None:
        for array in arrays:
            dist.all_reduce(array)

    def manager() -> None:
        with dist._coalescing_manager():
            loop()

    return {
        "`for array in arrays: dist.all_reduce(array)`": loop,
        "the same in `with dist._coalescing_manager():`": manager,
        "`dist.all_reduce_coalesced(arrays)`": lambda: dist.all_reduce_coalesced(arrays),
        "`functional.all_reduce(arrays)`, a list or a dict": lambda: functional.all_reduce(tree),
        "`dist.all_reduce(whole)`, one array of all": lambda: dist.all_reduce(whole),
    }


def forms_of_large_arrays() -> Forms:
    count = LARGE_BYTES // 4
    plain, symmetric = np.zeros(count, np.float32), dist.zeros(count, "float32")
    objects: list[Any] = [None] * RANKS
    return {
        "`dist.all_reduce(array)`": lambda: dist.all_reduce(plain),
        "`dist.all_reduce(symmetric)`": lambda: dist.all_reduce(symmetric),
        "`functional.all_reduce(array)`": lambda: functional.all_reduce(plain),
        "`dist.broadcast(array, 0)`": lambda: dist.broadcast(plain, 0),
        "`dist.broadcast(symmetric, 0)`": lambda: dist.broadcast(symmetric, 0),
        "`dist.send(array, 1)` and back": lambda: exchange(plain),
        "`dist.send(symmetric, 1)` and back": lambda: exchange(symmetric),
        "`dist.all_gather_object(things, array)`": lambda: dist.all_gather_object(objects, plain),
    }


def forms_with_jax(nbytes: int) -> Forms:
    import jax

    array = np.ones(nbytes // 4, np.float32)
    given = jax.numpy.asarray(array)

    def compiled(calls: int) -> Callable[[], Any]:
        def step(value: Any) -> Any:
            for _ in range(calls):
                value = functional.all_reduce(value, dist.ReduceOp.MAX)
            return value * 2

        made = jax.jit(step)
        return lambda: made(given).block_until_ready()

    return {
        "`dist.all_reduce(numpy_array)`": lambda: dist.all_reduce(array, dist.ReduceOp.MAX),
        "`functional.all_reduce(jax_array)`, outside of `jax.jit`": lambda: functional.all_reduce(
            given, dist.ReduceOp.MAX
        ),
        "a compiled function without a call": compiled(0),
        "the same with one call": compiled(1),
        "the same with 11 calls": compiled(11),
    }


GROUPS: dict[str, Callable[[], Forms]] = {
    "8 bytes": forms_of_8_bytes,
    f"{SMALL_ARRAYS} arrays of 64 bytes": forms_of_many_small_arrays,
    "16 MiB": forms_of_large_arrays,
}
if importlib.util.find_spec("jax"):
    GROUPS["8 bytes with JAX"] = lambda: forms_with_jax(8)
    GROUPS["1 MiB with JAX"] = lambda: forms_with_jax(1 << 20)


def times_of(forms: Forms, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the microseconds per call of the slower rank, of each form in each round."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, call in forms.items():
            # A turn of about so many seconds, after a first one that warms up.
            calls = max(1, round(seconds * 1e6 / min(times[name]))) if times[name] else 1
            dist.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            taken = np.array([(time.perf_counter() - began) / calls])
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times[name].append(float(taken[0]) * 1e6)
    return times


def rank_main(rank: int, path: str, arguments: argparse.Namespace, report: Connection) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group(init_method=f"file://{path}", rank=rank, world_size=RANKS)
    for name, make in GROUPS.items():
        times = times_of(make(), arguments.rounds, arguments.seconds)
        if rank == 0:
            report.send((name, times))
    dist.destroy_process_group()


def show(group: str, times: dict[str, list[float]]) -> None:
    print(f"| {group} | fastest, µs | median, µs | fastest, beside the first |\n|---|---|---|---|")
    first = min(next(iter(times.values())))
    for name, taken in times.items():
        fastest, median = min(taken), statistics.median(taken)
        print(f"| {name} | {_microseconds(fastest)} | {_microseconds(median)} | {fastest / first:.2f} |")
    print(flush=True)


def _microseconds(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.002, help="of each form in each round")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with TemporaryDirectory() as directory:
        path = str(Path(directory) / "store")
        ranks = [context.Process(target=rank_main, args=(rank, path, arguments, theirs)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        theirs.close()
        for _ in GROUPS:
            show(*ours.recv())
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
