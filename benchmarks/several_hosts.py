"""The peers between two hosts that are network namespaces of this machine, joined by one cable.

``procgroup`` shares memory on each host; ``procgroup-tcp`` uses TCP between all ranks; ``gloo`` is torch.distributed's.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from peer_commands import python_of, with_sources

from procgroup.diagnostics.bench.installed import ENVIRONMENT, MODULES, StartPeer
from procgroup.diagnostics.bench.peer import PeerCommand

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import two_hosts

Hosts = tuple[two_hosts.Host, two_hosts.Host]


def layout(text: str) -> tuple[int, int]:
    """Read "2+2" as the numbers of ranks on the two hosts. Raises ArgumentTypeError for anything else."""
    numbers = text.split("+")
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"expected the ranks of two hosts, such as 2+2, got {text}")
    return int(numbers[0]), int(numbers[1])


def joined() -> AbstractContextManager[Hosts]:
    """Make the hosts. Ends the program where there can be none."""
    if lack := two_hosts.lacks():
        sys.exit(f"two hosts cannot be made here: {lack}")
    return two_hosts.joined()


def peers(hosts: Hosts, ranks: Sequence[int]) -> Mapping[str, StartPeer]:
    """Return the peers, by name, with so many ranks on each host."""
    key = {"PROCGROUP_JOB_KEY": secrets.token_hex(32)}
    return {
        "procgroup": lambda _: _command("procgroup", "procgroup_peer", hosts, ranks, key),
        "procgroup-tcp": lambda _: _command(
            "procgroup-tcp", "procgroup_peer", hosts, ranks, {**key, "PROCGROUP_TRANSPORT": "tcp"}
        ),
        "gloo": lambda _: with_sources(
            _command("gloo", "gloo_peer", hosts, ranks, {"GLOO_SOCKET_IFNAME": "cable"}, python_of("gloo"))
        ),
    }


def _cores_of(host: int) -> str:
    cores = sorted(os.sched_getaffinity(0))
    half = max(len(cores) // 2, 1)
    return ",".join(str(core) for core in (cores[:half], cores[-half:])[host])


def _command(
    name: str,
    module: str,
    hosts: Hosts,
    ranks: Sequence[int],
    environment: Mapping[str, str],
    python: str = sys.executable,
) -> PeerCommand:
    """Start the ranks of both hosts from one shell, which ends when all have ended.

    Each host has half of the cores, so that its ranks find as many as they would on a machine of their own.
    """
    port = 20_000 + secrets.randbelow(10_000)
    places = [host for host, count in zip(hosts, ranks, strict=True) for _ in range(count)]
    lines = []
    for rank, host in enumerate(places):
        variables = {"RANK": rank, "WORLD_SIZE": len(places), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": port}
        program = [python, "-m", f"{MODULES}.{module}", "{socket}"]
        line = host.command(
            [
                "taskset",
                "--cpu-list",
                _cores_of(hosts.index(host)),
                "env",
                *(f"{key}={value}" for key, value in variables.items()),
                *program,
            ]
        )
        lines.append(shlex.join(line).replace("'{socket}'", "{socket}") + " &")
    return PeerCommand(name, ["sh", "-c", "\n".join([*lines, "wait"])], {**ENVIRONMENT, **environment})
