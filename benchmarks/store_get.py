"""Compare how fast one client gets 8 bytes from procgroup's TCPStore and from torch's.

Server and client are two processes, pinned to the same cores for both libraries; the two are measured in
turn, ROUNDS times, so that what disturbs the machine disturbs both. Prints each round's rates and ratio,
the medians, and the 95 % interval of the median ratio (bootstrap).

    python -m benchmarks.store_get --torch-python PATH [--rounds 10] [--seconds 1] [--cores 0,1]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys

CLIENT = """
import sys, time
{imports}
host = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
host.set("key", "8 bytes!")
print("ready", flush=True)
for line in sys.stdin:
    seconds, count = float(line), 0
    begin = time.perf_counter()
    while (now := time.perf_counter()) - begin < seconds:
        for _ in range(200):
            host.get("key")
        count += 200
    print(count / (now - begin), flush=True)
"""
SERVER = """
import sys
{imports}
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
IMPORTS = {"procgroup": "from procgroup.stores import TCPStore", "torch": "from torch.distributed import TCPStore"}


class Library:
    """One library's server and client, each a process that waits to be told to work."""

    def __init__(self, name: str, python: str) -> None:
        self.server = _start(python, SERVER.format(imports=IMPORTS[name]))
        port = _line(self.server)
        self.client = _start(python, CLIENT.format(imports=IMPORTS[name]), port)
        _line(self.client)

    def rate(self, seconds: float) -> float:
        """Return gets per second, measured for so long."""
        assert self.client.stdin is not None
        self.client.stdin.write(f"{seconds}\n")
        self.client.stdin.flush()
        return float(_line(self.client))

    def close(self) -> None:
        for process in (self.client, self.server):
            process.communicate()


def _start(python: str, program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [python, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"{process.args[0]} ended with status {process.wait()}")  # type: ignore[index]
    return line


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median, with a fixed seed."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", required=True, help="an interpreter that has torch")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="per library and round")
    parser.add_argument("--cores", default="", help="comma-separated; all that are usable when not given")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})

    libraries = {"procgroup": Library("procgroup", sys.executable), "torch": Library("torch", options.torch_python)}
    rates: dict[str, list[float]] = {name: [] for name in libraries}
    for number in range(options.rounds):
        for name, library in libraries.items():
            rates[name].append(library.rate(options.seconds))
        ours, theirs = rates["procgroup"][-1], rates["torch"][-1]
        print(f"round {number + 1:2}: procgroup {ours:9,.0f}/s  torch {theirs:9,.0f}/s  ratio {ours / theirs:.2f}")
    for library in libraries.values():
        library.close()

    ratios = [ours / theirs for ours, theirs in zip(rates["procgroup"], rates["torch"], strict=True)]
    low, high = interval(ratios)
    medians = ", ".join(f"{name} {statistics.median(values):,.0f}/s" for name, values in rates.items())
    print(f"medians: {medians}; ratio {statistics.median(ratios):.2f} (95 % interval {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
