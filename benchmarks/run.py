"""Run procgroup beside Gloo, MPICH, Open MPI and the hardware's limit, interleaved, and print ratios with intervals."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from peer_commands import DEFAULT_PEERS, PEERS
from rich.console import Console

from procgroup.diagnostics.bench.peer import Peer
from procgroup.diagnostics.bench.protocol import PeerFailure
from procgroup.diagnostics.bench.report import Report, parse_size
from procgroup.diagnostics.bench.rounds import InterleavedRun, SizeResult, connect_all

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
)
console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


def arguments_of(command_line: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--op", default="all_reduce", choices=OPERATIONS, help="send_recv is half a round trip of ranks 0 and 1"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="8,64K,1M,16M,64M", help="bytes of one rank's array or piece")
    parser.add_argument("--rounds", type=int, default=10, help="10 or a multiple balances the order of 5 peers")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of one peer's turn")
    parser.add_argument("--peers", default=",".join(DEFAULT_PEERS), help=f"which take part, of {', '.join(PEERS)}")
    parser.add_argument("--reference", default="procgroup", help="the peer that the others are compared with")
    parser.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="keep rank i on core i modulo the usable cores; without either, only when there is a core for each rank",
    )
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds after which a start or a turn counts as stuck"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    arguments = parser.parse_args(command_line)
    try:
        arguments.sizes = [parse_size(text) for text in arguments.sizes.split(",")]
        arguments.peers = _known_peers(arguments.peers.split(","))
    except ValueError as error:
        parser.error(str(error))
    if arguments.ranks < 2 or arguments.rounds < 1:
        parser.error("expected at least 2 ranks and 1 round")
    if arguments.pin is None:
        arguments.pin = arguments.ranks <= len(os.sched_getaffinity(0))
    if arguments.op == "barrier":
        arguments.sizes = [4]
    return arguments


def _known_peers(names: list[str]) -> list[str]:
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        raise ValueError(f"unknown peers {', '.join(unknown)}; known are {', '.join(PEERS)}")
    return names


def start(
    names: Sequence[str], ranks: int, pin: bool, directory: Path, on_exit: contextlib.ExitStack
) -> dict[str, Peer]:
    """Start the peers that can be had; say which cannot."""
    peers = {}
    for name in names:
        try:
            command = PEERS[name](ranks)
            if pin:
                command = replace(command, arguments=[*command.arguments, "--pin"])
            peers[name] = on_exit.enter_context(Peer(command, ranks, directory))
        except PeerFailure as failure:
            say(f"left out: {failure}")
    return peers


def run(arguments: argparse.Namespace) -> Report:
    with contextlib.ExitStack() as on_exit:
        directory = Path(on_exit.enter_context(tempfile.TemporaryDirectory(prefix="procgroup-bench-")))
        peers = start(arguments.peers, arguments.ranks, arguments.pin, directory, on_exit)
        interleaved = InterleavedRun(
            arguments.op, peers, arguments.rounds, arguments.seconds, arguments.timeout, tell=say
        )
        for failure in connect_all(peers, arguments.timeout):
            interleaved.leave_out(failure)
        descriptions = {name: peer.description for name, peer in peers.items()}
        for name, description in descriptions.items():
            say(f"{name}: {description}")
        results: list[SizeResult] = interleaved.sizes(arguments.sizes)
        report = Report(
            operation=arguments.op,
            ranks=arguments.ranks,
            reference=arguments.reference if arguments.reference in peers else next(iter(peers), arguments.reference),
            descriptions=descriptions,
            results=results,
            left_out=interleaved.left_out,
            idle_ns={name: peer.idle_ns for name, peer in peers.items()},
        )
        for peer in peers.values():
            peer.close()
        return report


def say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def main(command_line: Sequence[str] | None = None) -> int:
    """Return 0 when there is something to compare, 1 when fewer than two peers were measured to the end."""
    arguments = arguments_of(command_line)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if os.getloadavg()[0] > 0.5:
        say(f"this machine is busy (load average {os.getloadavg()[0]:.1f}): expect wide intervals")
    report = run(arguments)
    console.print(report.table())
    for name, reason in report.left_out.items():
        say(f"{name} was left out: {reason}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_dict(), indent=1))
    return 0 if len(report.descriptions) - len(report.left_out.keys() & report.descriptions.keys()) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
