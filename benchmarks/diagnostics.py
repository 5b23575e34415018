"""What the flight recorder, the comparison of descriptors and the watch over the ranks cost per call.

python benchmarks/diagnostics.py [--ranks 1,2,4] [--sizes 8,64K] [--op all_reduce] [--starts 7] [--rounds 20]

Builds procgroup as it is, and once more with PROCGROUP_WITHOUT_DIAGNOSTICS, each in an environment of its own under
build/peers/. Both take turns, and both are started anew several times, because the memory that a process happens to get
changes a time of a call of 64 KiB by some 3 %. Prints for each number of ranks and each size the time of a call, and by
how much it is longer with diagnostics: medians and minima, and the ratio of the medians with the interval that holds
the true one in 95 of 100 runs. Where that has both signs, nothing is shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from peer_commands import wheel

from procgroup.diagnostics.bench.installed import StartPeer
from procgroup.diagnostics.bench.intervals import ratio_of_rounds
from procgroup.diagnostics.bench.peer import BenchPeer
from procgroup.diagnostics.bench.report import parse_size, size_text
from procgroup.diagnostics.bench.rounds import InterleavedRun, SizeResult, connect_all

SOURCES = Path(__file__).resolve().parent.parent
WITH, WITHOUT = "with", "without"
HEADINGS = """                       without                       with            difference
ranks  bytes        median      minimum       median      minimum     median    minimum  ratio, 95 % interval"""


def main(command_line: Sequence[str], builds: Mapping[str, StartPeer] | None = None) -> int:
    """Measure and print; return the exit status. ``builds`` says how the two are started, if they are there already."""
    parser = argparse.ArgumentParser(description="Measure what diagnostics cost per call.")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks; 1,2,4 by default")
    parser.add_argument("--sizes", default="8,1K,16K,64K,256K,1M,4M,16M,64M", help="bytes of one rank's array or block")
    parser.add_argument("--op", default="all_reduce", help="operations; all_reduce by default")
    parser.add_argument("--starts", type=int, default=7, help="how often both are started anew; 7 by default")
    parser.add_argument(
        "--rounds", type=int, default=20, help="turns of each at each size after a start; 20 by default"
    )
    parser.add_argument("--seconds", type=float, default=0.01, help="length of one turn; 0.01 by default")
    arguments = parser.parse_args(command_line)
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    if builds is None:
        builds = {name: wheel(f"diagnostics-{name}", build(name)) for name in (WITHOUT, WITH)}
    for operation in arguments.op.split(","):
        print(f"\n{operation}, float32, on {len(os.sched_getaffinity(0))} cores, in nanoseconds per call\n\n{HEADINGS}")
        for ranks in map(int, arguments.ranks.split(",")):
            starts: dict[int, list[SizeResult]] = defaultdict(list)
            for _ in range(arguments.starts):
                for result in measure(builds, operation, ranks, sizes, arguments.rounds, arguments.seconds):
                    starts[result.size].append(result)
            for size, results in starts.items():
                print(row(ranks, size, results), flush=True)
    return 0


def build(name: str) -> Path:
    """Build the wheel of one of the two, and return its file."""
    directory = SOURCES / "build" / f"diagnostics-{name}"
    options = [f"build-dir={directory / 'objects'}"]
    if name == WITHOUT:
        options.append("cmake.define.PROCGROUP_WITHOUT_DIAGNOSTICS=ON")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(directory),
        str(SOURCES),
    ]
    print(f"building procgroup {name} diagnostics ...", flush=True)
    subprocess.run([*command, *(f"--config-settings={option}" for option in options)], check=True)
    return max(directory.glob("*.whl"), key=lambda file: file.stat().st_mtime)


def measure(
    builds: Mapping[str, StartPeer], operation: str, ranks: int, sizes: Sequence[int], rounds: int, seconds: float
) -> list[SizeResult]:
    """Start the ranks of both builds, and let the builds take turns at each size. Raises PeerFailure."""
    cores = len(os.sched_getaffinity(0))
    flags = ["--pin"] if ranks <= cores else []
    with ExitStack() as on_exit:
        directory = Path(on_exit.enter_context(tempfile.TemporaryDirectory(prefix="procgroup-bench-")))
        peers: dict[str, BenchPeer] = {}
        for name, start in builds.items():
            command = start(ranks)
            command = replace(command, name=name, arguments=[*command.arguments, *flags])
            peers[name] = on_exit.enter_context(BenchPeer(command, ranks, directory))
        failures = connect_all(peers, timeout=60)
        run = InterleavedRun(operation, dict(peers), rounds, seconds, 120, print, shares_cores=ranks > cores)
        for failure in failures:
            run.leave_out(failure)
        results = run.sizes(sizes)
        for peer in peers.values():
            peer.close()
        if run.left_out:
            sys.exit(f"a build was left out: {run.left_out}")
        return results


def row(ranks: int, size: int, starts: Sequence[SizeResult]) -> str:
    """Return one line of the table: of one size, after several starts."""
    medians = {name: [result.median_ns(name) for result in starts] for name in (WITHOUT, WITH)}
    minima = {name: min(result.minimum_ns(name) for result in starts) for name in medians}
    times = "".join(f"{statistics.median(medians[name]):13,.0f}{minima[name]:13,.0f}" for name in medians)
    difference = statistics.median(a - b for a, b in zip(medians[WITH], medians[WITHOUT], strict=True))
    ratio = ratio_of_rounds(medians[WITH], medians[WITHOUT])
    interval = f"{ratio.mean - 1:+.1%} ({ratio.low - 1:+.1%} to {ratio.high - 1:+.1%})"
    return (
        f"{ranks:5}{size_text(size):>7}{times}{difference:+11,.0f}{minima[WITH] - minima[WITHOUT]:+11,.0f}  {interval}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
