"""A peer whose ranks do what a test tells them: ``scripted_peer.py SOCKET RANKS BEHAVIOUR``.

Its one operation, all_reduce, adds by arithmetic on what every rank is known to hold, so it needs no other rank.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from procgroup.diagnostics.bench.rank_loop import BenchArrays, Call, Driver, serve


def all_reduce(buffers: BenchArrays) -> Call:
    behaviour = sys.argv[3]
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == 20 and buffers.rank == buffers.ranks - 1 and behaviour == "dies":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        if behaviour in ("dies", "stuck") and calls >= 20:
            time.sleep(600)
        if behaviour == "slow":
            time.sleep(0.002)
        if behaviour != "wrong" and calls == 1:
            buffers.array[:] = np.float32(buffers.ranks * (buffers.ranks + 1) / 2)

    return call


def main() -> int:
    ranks = int(sys.argv[2])
    if sys.argv[3] == "never starts":
        print("no such library", file=sys.stderr)
        return 7
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            driver = Driver(sys.argv[1])
            if sys.argv[3] == "silent":
                time.sleep(600)
            if sys.argv[3] == "foreign":
                driver.say("GET / HTTP/1.1")
            serve(driver, rank, ranks + (sys.argv[3] == "miscounts"), {"all_reduce": all_reduce}, "scripted 1.0")
            return 0
        children.append(child)
    return max([os.waitpid(child, 0)[1] for child in children])


if __name__ == "__main__":
    sys.exit(main())
