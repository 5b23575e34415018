"""``procgroup bench``: measure procgroup beside what is installed, interleaved, and print ratios with intervals.

::

    main     arguments -> one Report per operation -> tables, JSON, a picture
    run      starts the peers once, then measures every operation and size in rounds (rounds.InterleavedRun)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from procgroup.diagnostics.bench import installed
from procgroup.diagnostics.bench.peer import BenchPeer
from procgroup.diagnostics.bench.report import Report, draw, parse_size, require_matplotlib, show
from procgroup.diagnostics.bench.rounds import InterleavedRun, connect_all
from procgroup.errors import PeerFailure
from procgroup.process.environ import RANK

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "send_recv",
    "window",
)
ITEM_SIZES = {"float32": 4, "float64": 8, "float16": 2, "int32": 4, "int64": 8}
_EPILOG = """
The command starts the ranks of every peer itself, and keeps them for the whole run. For every size the peers take
turns in changing order; one turn of each is a round. A time is that of the slowest rank, per call. The ratio is the
peer's time divided by the reference's, as the geometric mean over the rounds, with its 95 % interval: "ahead" means
that the whole interval is above 1, "behind" below 1, "open" that 1 is inside it: the run does not show which is faster.
"""


def main(
    command_line: Sequence[str],
    known: Mapping[str, installed.StartPeer] = installed.PEERS,
    default: Sequence[str] = installed.DEFAULT_PEERS,
) -> int:
    """Measure; return 0, or 1 when a peer that was named, or every peer, could not be measured to the end.

    ``known`` maps the names of peers to how they are started; ``default`` are those that take part where they are
    installed.
    """
    arguments = _arguments_of(command_line, known, default)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if os.getloadavg()[0] > 0.5:
        _say(f"this machine is busy (load average {os.getloadavg()[0]:.1f}): expect wide intervals")
    reports: list[Report] = []
    for report in run(arguments, known):
        reports.append(report)
        _say("")
        show(report)
    left_out = {name: reason for report in reports for name, reason in report.left_out.items()}
    for name, reason in left_out.items():
        _say(f"{name} was left out: {reason}")
    if arguments.json:
        arguments.json.write_text(json.dumps([report.as_dict() for report in reports], indent=1) + "\n")
    measured = {name for report in reports for result in report.results for name in result.rounds} - set(left_out)
    if arguments.plot and measured:
        draw(reports, arguments.plot)
    return 0 if measured and measured >= set(arguments.named) else 1


def run(arguments: argparse.Namespace, known: Mapping[str, installed.StartPeer]) -> Iterator[Report]:
    """Start the peers, and yield the report of each operation as soon as it is measured."""
    with contextlib.ExitStack() as on_exit:
        directory = Path(on_exit.enter_context(tempfile.TemporaryDirectory(prefix="procgroup-bench-")))
        peers, left_out = _start(arguments, known, directory, on_exit)
        for operation in arguments.op:
            run = InterleavedRun(
                operation,
                peers,
                arguments.rounds,
                arguments.seconds,
                arguments.timeout,
                _say,
                dict(left_out),
                shares_cores=arguments.ranks > len(os.sched_getaffinity(0)),
            )
            names = list(peers)
            sizes = [ITEM_SIZES[arguments.dtype]] if operation == "barrier" else arguments.sizes
            results = run.sizes(sizes)
            left_out = run.left_out
            reference = arguments.reference if arguments.reference in names else next(iter(names), arguments.reference)
            yield Report(
                operation=operation,
                dtype=arguments.dtype,
                ranks=arguments.ranks,
                reference=reference,
                descriptions={name: peers[name].description for name in names if name in peers},
                results=results,
                left_out=left_out,
                idle_ns={name: peer.idle_ns for name, peer in peers.items()},
            )
        for peer in peers.values():
            peer.close()


def _start(
    arguments: argparse.Namespace,
    known: Mapping[str, installed.StartPeer],
    directory: Path,
    on_exit: contextlib.ExitStack,
) -> tuple[dict[str, BenchPeer], dict[str, str]]:
    """Start the peers that can be had, wait for their ranks, and say which take part; return them and the others."""
    peers: dict[str, BenchPeer] = {}
    left_out: dict[str, str] = {}
    for name in arguments.peers:
        try:
            command = known[name](arguments.ranks)
            if arguments.dtype != "float32" and command.only_float32:
                raise PeerFailure(name, "it measures float32 only")
            flags = ["--pin"] if arguments.pin else []
            flags += [] if command.only_float32 else ["--dtype", arguments.dtype]
            command = replace(command, arguments=[*command.arguments, *flags])
            peers[name] = on_exit.enter_context(BenchPeer(command, arguments.ranks, directory))
        except PeerFailure as failure:
            _say(f"left out: {failure}")
            if name in arguments.named:
                left_out[name] = failure.reason
    for absent in connect_all(peers, arguments.timeout):
        _say(f"left out: {absent}")
        left_out[absent.peer] = absent.reason
        peers.pop(absent.peer).kill()
    for name, peer in peers.items():
        _say(f"{name}: {peer.description}")
    return peers, left_out


def _arguments_of(
    command_line: Sequence[str], known: Mapping[str, installed.StartPeer], default: Sequence[str]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="procgroup bench",
        description="Measure procgroup and the other installed libraries (Gloo through PyTorch, MPI through mpi4py).",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--op", default="all_reduce", metavar="NAMES", help=f"operations, of {', '.join(OPERATIONS)}; or all")
    add("-n", "--ranks", type=int, default=2, metavar="N", help="ranks of each peer; 2 by default")
    add("--sizes", default="8,64K,1M,16M,64M", help="bytes of one rank's array or block; 8,64K,1M,16M,64M by default")
    add("--dtype", default="float32", choices=ITEM_SIZES, help="type of the elements; float32 by default")
    add("--rounds", type=int, default=10, metavar="N", help="more rounds narrow the intervals; 10 by default")
    add("--seconds", type=float, default=0.1, help="length of one peer's turn; 0.1 by default")
    add(
        "--peers",
        metavar="NAMES",
        help=f"of {', '.join(known)}; by default those of {', '.join(default)} that run here",
    )
    add("--reference", default="procgroup", metavar="NAME", help="the peer that the others are compared with")
    add(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="keep rank i on core i modulo the usable cores; without either, only when there is a core for each rank",
    )
    add("--timeout", type=float, default=120, metavar="SECONDS", help="when a start or a turn counts as stuck; 120")
    add("--json", type=Path, metavar="FILE", help="write every round there, in nanoseconds per call")
    add("--plot", type=Path, metavar="FILE", help="draw the times over the sizes (.png, .svg, .pdf); needs matplotlib")
    arguments = parser.parse_args(command_line)
    try:
        _check(arguments, known, default)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _check(arguments: argparse.Namespace, known: Mapping[str, installed.StartPeer], default: Sequence[str]) -> None:
    """Read the lists of the arguments. Raises ValueError for what cannot be measured, before anything starts."""
    if RANK.is_set():
        raise ValueError("procgroup bench starts its own ranks: run it once, without a launcher, and give it -n N")
    arguments.op = list(OPERATIONS) if arguments.op == "all" else _names("operation", arguments.op, OPERATIONS)
    arguments.named = _names("peer", arguments.peers, known) if arguments.peers else []
    arguments.peers = arguments.named or list(default)
    arguments.sizes = [parse_size(text, ITEM_SIZES[arguments.dtype]) for text in arguments.sizes.split(",")]
    if arguments.ranks < 2 or arguments.rounds < 1:
        raise ValueError("expected at least 2 ranks and 1 round")
    if arguments.plot:
        require_matplotlib()
    for file in filter(None, (arguments.json, arguments.plot)):
        if not file.absolute().parent.is_dir():
            raise ValueError(f"there is no directory {file.absolute().parent} for {file.name}")
    if arguments.pin is None:
        arguments.pin = arguments.ranks <= len(os.sched_getaffinity(0))


def _names(kind: str, text: str, known: Sequence[str] | Mapping[str, object]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown {kind}s {', '.join(unknown)}; known are {', '.join(known)}")
    return names


def _say(line: str) -> None:
    print(line, flush=True)
