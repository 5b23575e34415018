"""Run procgroup beside Gloo, MPICH, Open MPI and the hardware's limit: ``procgroup bench`` with peers of their own.

Takes the arguments of ``procgroup bench``, and these:

    --before WHEEL     a peer "before": procgroup as that wheel has it, beside procgroup as it is installed here
    --after WHEEL      a peer "after", in the place of procgroup as it is installed here
    --hosts 2+2        so many ranks on each of two hosts, which are network namespaces of this machine (root only)

Each peer has a virtual environment of its own under build/peers/.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

import several_hosts
from peer_commands import DEFAULT_PEERS, PEERS, wheel

from procgroup.diagnostics.bench.command import main


def run(command_line: list[str]) -> int:
    """Measure with the peers that the arguments choose; return the exit status."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path)
    parser.add_argument("--hosts", type=several_hosts.layout)
    own, rest = parser.parse_known_args(command_line)
    with ExitStack() as on_exit:
        if own.hosts:
            peers = several_hosts.peers(on_exit.enter_context(several_hosts.joined()), own.hosts)
            return main([*rest, "--ranks", str(sum(own.hosts)), "--no-pin"], peers, tuple(peers))
        wheels = {name: file for name, file in (("after", own.after), ("before", own.before)) if file}
        if not wheels:
            return main(rest, PEERS, DEFAULT_PEERS)
        reference = "after" if own.after else "procgroup"
        peers = {**PEERS, **{name: wheel(name, file) for name, file in wheels.items()}}
        return main(["--reference", reference, *rest], peers, (reference, "before") if own.before else (reference,))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
