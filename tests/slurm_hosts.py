"""Several hosts on this machine, and a Slurm on them: each has a network, a host name and an /etc/hosts of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import slurm_cluster
import two_hosts

_CONTROLLER_PORT = 17117


def lacks() -> str:
    """Return why there can be none here; "" where there can."""
    return slurm_cluster.lacks() or two_hosts.lacks()


@contextmanager
def joined(folder: Path, count: int) -> Iterator[dict[str, tuple[str, ...]]]:
    """Make hosts node1, node2, ... that reach each other; yield, by name, what stands before a command that runs there.

    Their /etc/hosts lies in ``folder``.
    """
    names = [f"node{number}" for number in range(1, count + 1)]
    entries = [("127.0.0.1", "localhost"), *zip(addresses(count), names, strict=True)]
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for address, name in entries))
    with _networks(count) as networks:
        pairs = zip(names, networks, strict=True)
        yield {name: _command_on(network, name, folder / "hosts") for name, network in pairs}


@contextmanager
def running(folder: Path, count: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Start Slurm on such hosts; yield what stands before a command on the first, and the environment of commands."""
    with joined(folder, count) as hosts:
        nodes = [
            slurm_cluster.Node(name, f"NodeAddr={address}", prefix)
            for (name, prefix), address in zip(hosts.items(), addresses(count), strict=True)
        ]
        controller = f"node1({addresses(count)[0]})"
        with slurm_cluster.running_on(folder, nodes, controller, _CONTROLLER_PORT) as environment:
            yield list(hosts["node1"]), environment


def remote_shell(folder: Path, hosts: dict[str, tuple[str, ...]]) -> str:
    """Return the path of a program that runs a command on one of these hosts as ssh does: ``PROGRAM HOST COMMAND``."""
    cases = "".join(
        f'{name}|{address}) exec {shlex.join(prefix)} sh -c "$*";;\n'
        for (name, prefix), address in zip(hosts.items(), addresses(len(hosts)), strict=True)
    )
    program = folder / "remote_shell"
    program.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f'host=$1; shift\ncase $host in\n{cases}esac\necho "no host $host" >&2; exit 1\n'
    )
    program.chmod(0o755)
    return str(program)


def addresses(count: int) -> list[str]:
    """Return the addresses of the hosts, in order."""
    return [f"192.168.78.{number}" for number in range(1, count + 1)]


def _command_on(network: str, name: str, hosts: Path) -> tuple[str, ...]:
    """Return what stands before a command that is to run on a host."""
    enter = f'hostname {name}; mount --bind {hosts} /etc/hosts; exec "$@"'
    # Not ip netns exec, which mounts another /sys: slurmd needs the control groups there.
    return ("nsenter", f"--net=/run/netns/{network}", "unshare", "--uts", "--mount", "sh", "-c", enter, "sh")


@contextmanager
def _networks(count: int) -> Iterator[list[str]]:
    """Make network namespaces that a bridge in another one joins; take them away with all that runs there."""
    switch = f"switch-{os.getpid()}"
    networks = [f"node-{os.getpid()}-{number}" for number in range(1, count + 1)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, (network, address) in enumerate(zip(networks, addresses(count), strict=True), start=1):
            port = f"port{number}"
            _ip("netns", "add", network)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "cable", "netns", network)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", network, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", network, "link", "set", device, "up")
        yield networks
    finally:
        for network in (*networks, switch):
            running = subprocess.run(["ip", "netns", "pids", network], capture_output=True, text=True)
            subprocess.run(["kill", "-9", *running.stdout.split()], capture_output=True)
            subprocess.run(["ip", "netns", "delete", network], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)
