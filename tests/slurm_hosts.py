"""Several hosts on this machine, and a Slurm on them: each has a network, a host name and an /etc/hosts of its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import bridged_hosts
import slurm_cluster
import two_hosts

_CONTROLLER_PORT = 17117


def lacks() -> str:
    """Return why there can be none here; "" where there can."""
    return slurm_cluster.lacks() or two_hosts.lacks()


class Node(NamedTuple):
    """A host: its name, its address, and what stands before a command that is to run there."""

    name: str
    address: str
    prefix: tuple[str, ...]


@contextmanager
def joined(folder: Path, names: Sequence[str], domain: str = "test") -> Iterator[list[Node]]:
    """Make hosts of these names, in a domain, that reach each other; their /etc/hosts is in ``folder``."""
    with bridged_hosts.connected(len(names)) as switch:
        nodes = [
            Node(name, host.address, _command_on(host, name, folder / "hosts"))
            for name, host in zip(names, switch.hosts, strict=True)
        ]
        whole = [f"{node.address} {node.name}.{domain} {node.name}\n" for node in nodes]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(whole))
        yield nodes


@contextmanager
def running(folder: Path, count: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Start Slurm on so many hosts; yield what stands before a command on the first, and the commands' environment."""
    with joined(folder, [f"node{number}" for number in range(1, count + 1)]) as hosts:
        nodes = [slurm_cluster.Node(host.name, f"NodeAddr={host.address}", host.prefix) for host in hosts]
        controller = f"{hosts[0].name}({hosts[0].address})"
        with slurm_cluster.running_on(folder, nodes, controller, _CONTROLLER_PORT) as environment:
            yield list(hosts[0].prefix), environment


def remote_shell(folder: Path, hosts: Sequence[Node]) -> str:
    """Return the path of a program that runs a command on one of these hosts as ssh does: ``PROGRAM HOST COMMAND``."""
    cases = "".join(f'{host.name}|{host.address}) exec {shlex.join(host.prefix)} sh -c "$*";;\n' for host in hosts)
    program = folder / "remote_shell"
    program.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f'host=$1; shift\ncase $host in\n{cases}esac\necho "no host $host" >&2; exit 1\n'
    )
    program.chmod(0o755)
    return str(program)


def _command_on(host: two_hosts.Host, name: str, hosts: Path) -> tuple[str, ...]:
    """Return what stands before a command that is to run on a host."""
    enter = f'hostname {name}; mount --bind {hosts} /etc/hosts; exec "$@"'
    # Not ip netns exec, which mounts another /sys: slurmd needs the control groups there.
    return ("nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--mount", "sh", "-c", enter, "sh")
