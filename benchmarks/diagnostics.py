"""What the flight recorder, the comparison of descriptors and the watch over the ranks cost per call.

python benchmarks/diagnostics.py [--ranks 1,2,4] [--sizes 8,64K] [--op all_reduce] [--rounds 40] [--seconds 0.05]

Builds procgroup as it is, and once more with PROCGROUP_WITHOUT_DIAGNOSTICS, each in an environment of its own under
build/peers/, and lets the two take turns. Prints for each number of ranks and each size the time of a call of both
builds, and by how much it is longer with diagnostics: the median of the differences of the rounds, and the difference
of the minima.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from peer_commands import wheel

from procgroup.diagnostics.bench.installed import StartPeer
from procgroup.diagnostics.bench.peer import Peer
from procgroup.diagnostics.bench.report import parse_size, size_text
from procgroup.diagnostics.bench.rounds import InterleavedRun, SizeResult, connect_all

SOURCES = Path(__file__).resolve().parent.parent
WITH, WITHOUT = "with", "without"
HEADINGS = "ranks   bytes   without: median  minimum      with: median  minimum       difference of medians    minima"


def main(command_line: Sequence[str], builds: Mapping[str, StartPeer] | None = None) -> int:
    """Measure and print; return the exit status. ``builds`` says how the two are started, if they are there already."""
    parser = argparse.ArgumentParser(description="Measure what diagnostics cost per call.")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks; 1,2,4 by default")
    parser.add_argument("--sizes", default="8,1K,16K,64K,256K,1M,4M,16M,64M", help="bytes of one rank's array or block")
    parser.add_argument("--op", default="all_reduce", help="operations; all_reduce by default")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each build at each size; 40 by default")
    parser.add_argument("--seconds", type=float, default=0.05, help="length of one turn; 0.05 by default")
    arguments = parser.parse_args(command_line)
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    if builds is None:
        builds = {name: wheel(f"diagnostics-{name}", build(name)) for name in (WITH, WITHOUT)}
    for operation in arguments.op.split(","):
        print(f"\n{operation}, float32, on {len(os.sched_getaffinity(0))} cores, in nanoseconds per call\n\n{HEADINGS}")
        for ranks in map(int, arguments.ranks.split(",")):
            for result in measure(builds, operation, ranks, sizes, arguments.rounds, arguments.seconds):
                print(row(ranks, result), flush=True)
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
        peers: dict[str, Peer] = {}
        for name, start in builds.items():
            command = start(ranks)
            command = replace(command, name=name, arguments=[*command.arguments, *flags])
            peers[name] = on_exit.enter_context(Peer(command, ranks, directory))
        for failure in connect_all(peers, timeout=60):
            raise failure
        run = InterleavedRun(operation, dict(peers), rounds, seconds, 120, print, shares_cores=ranks > cores)
        results = run.sizes(sizes)
        for peer in peers.values():
            peer.close()
        return results


def row(ranks: int, result: SizeResult) -> str:
    """Return one line of the table."""
    differences = [
        one.median_ns - other.median_ns for one, other in zip(result.rounds[WITH], result.rounds[WITHOUT], strict=True)
    ]
    median, minimum = statistics.median(differences), result.minimum_ns(WITH) - result.minimum_ns(WITHOUT)
    without, with_ = result.median_ns(WITHOUT), result.median_ns(WITH)
    return (
        f"{ranks:5}{size_text(result.size):>8}{without:18,.0f}{result.minimum_ns(WITHOUT):9,.0f}"
        f"{with_:18,.0f}{result.minimum_ns(WITH):9,.0f}{median:+18,.0f} ({median / without:+6.1%}){minimum:+10,.0f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
