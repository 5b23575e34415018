"""Numbers, small arrays and small objects beside mpi4py on MPICH and on Open MPI, in turn.

::

    python benchmarks/small_things.py [--ranks 2] [--ops NAMES] [--peers NAMES] [--rounds 10] [--before WHEEL]

Each operation is written as users of that library write it: docs/guide/mpi4py.md has both forms. Peers, rounds and
ratios are those of run.py: a ratio is the peer's time divided by procgroup's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import peer_commands

from procgroup.diagnostics.bench.peer import BenchPeer, PeerCommand
from procgroup.diagnostics.bench.rounds import InterleavedRun, SizeResult, connect_all

HERE = Path(__file__).resolve().parent
REFERENCE = "procgroup"

OPERATIONS = (
    "all_reduce_number",
    "all_gather_number",
    "sendrecv_array",
    "guide_step",
    "sendrecv_number",
    "broadcast_number",
    "all_reduce_integer",
    "object_ping_pong",
    "all_gather_object",
    "broadcast_object",
    "gather_object",
    "scatter_object",
    "max_and_rank",
    "own_op",
    "master_worker",
    "all_reduce_tree",
)


def start(arguments: argparse.Namespace, on_exit: ExitStack) -> dict[str, BenchPeer]:
    """Start the ranks of all peers. Raises PeerFailure where one cannot be had."""
    known: dict[str, Callable[[int], PeerCommand]] = {name: peer_commands.PEERS[name] for name in arguments.peers}
    if arguments.before:
        known["before"] = peer_commands.wheel("before", arguments.before)
    directory = Path(on_exit.enter_context(tempfile.TemporaryDirectory(prefix="procgroup-bench-")))
    pin = ["--pin"] if arguments.ranks <= len(os.sched_getaffinity(0)) else []
    peers = {}
    for name, make in known.items():
        command = make(arguments.ranks)
        *launcher, _, _, socket = command.arguments  # "-m" and the module that run.py starts
        library = "mpi4py" if name in ("mpich", "openmpi") else "procgroup"
        program = [str(HERE / f"small_with_{library}.py"), socket, *pin]
        command = replace(command, arguments=[*launcher, *program])
        peers[name] = on_exit.enter_context(BenchPeer(command, arguments.ranks, directory))
    for failure in connect_all(peers, arguments.timeout):
        raise failure
    return peers


def row_of(operation: str, ranks: int, result: SizeResult) -> dict[str, Any]:
    """Return what was measured of one operation: medians in ns, and ratios with their intervals."""
    row: dict[str, Any] = {"operation": operation, "ranks": ranks, "peers": {}}
    for name in result.rounds:
        ratio = result.ratio(name, REFERENCE)
        assert ratio is not None
        row["peers"][name] = {
            "median_ns": result.median_ns(name), "ratio": ratio.mean, "low": ratio.low, "high": ratio.high,
        }  # fmt: skip
    return row


def text_of(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = [f"{row['operation']:20}"]
    for name, found in row["peers"].items():
        cell = f"{name} {found['median_ns'] / 1000:8.2f}"
        cells.append(
            cell if name == REFERENCE else f"{cell}, {found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
        )
    return " | ".join(cells)


def main() -> None:
    """Measure, and print a line for each operation."""
    parser = argparse.ArgumentParser(description="Measure numbers and small objects beside mpi4py.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ops", type=lambda text: text.split(","), default=OPERATIONS)
    parser.add_argument("--peers", type=lambda text: text.split(","), default=(REFERENCE, "mpich", "openmpi"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shares_cores = arguments.ranks > len(os.sched_getaffinity(0))
    rows = []
    with ExitStack() as on_exit:
        peers = start(arguments, on_exit)
        print(f"{arguments.ranks} ranks, median us; ratio: time of the peer / time of procgroup, 95 % interval")
        for operation in arguments.ops:
            run = InterleavedRun(
                operation,
                peers,
                arguments.rounds,
                arguments.seconds,
                arguments.timeout,
                print,
                shares_cores=shares_cores,
            )
            (result,) = run.sizes([8])
            rows.append(row_of(operation, arguments.ranks, result))
            print(text_of(rows[-1]), flush=True)
        for peer in peers.values():
            peer.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
