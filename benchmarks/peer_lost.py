"""How soon the survivors learn that a rank was killed: SIGKILL of one of 4 ranks in the middle of all_reduce.

python benchmarks/peer_lost.py [--runs 20]

Prints the median, the 95th percentile and the worst of all survivors' times, from the kill to the exception.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

RANKS = 4
VICTIM = 2


def rank_main(rank: int, path: str, report: Connection) -> None:
    """Reduce until a peer is lost; report when that was, on the clock that all processes of a host share."""
    import numpy

    import procgroup as dist

    dist.init_process_group(init_method=f"file://{path}", rank=rank, world_size=RANKS)
    array = numpy.zeros(1000)
    dist.all_reduce(array)
    report.send("ready")
    try:
        while True:
            dist.all_reduce(array)
    except dist.PeerLost as error:
        report.send((time.monotonic(), error.peer))


def measure(directory: str) -> list[float]:
    """Return the milliseconds from one kill to each survivor's PeerLost."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(RANKS)]
    path = str(Path(directory) / "store")
    ranks = [context.Process(target=rank_main, args=(rank, path, pipes[rank][1])) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for ours, _ in pipes:
        ours.recv()
    time.sleep(0.05)  # into the middle of the loop
    victim = ranks[VICTIM].pid
    assert victim is not None
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    told = [pipes[rank][0].recv() for rank in range(RANKS) if rank != VICTIM]
    for process in ranks:
        process.join()
    assert all(peer == VICTIM for _, peer in told), told
    return [(moment - killed) * 1e3 for moment, _ in told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    times: list[float] = []
    for _ in range(parser.parse_args().runs):
        with TemporaryDirectory() as directory:
            times += measure(directory)
    p95 = statistics.quantiles(times, n=20)[-1]
    print(
        f"PeerLost on {len(times)} survivors: median {statistics.median(times):.2f} ms, p95 {p95:.2f} ms, "
        f"worst {max(times):.2f} ms"
    )


if __name__ == "__main__":
    main()
