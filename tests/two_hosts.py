"""Two hosts on this machine: network namespaces that one cable joins. What crosses between them crosses a network."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

ADDRESSES = ("192.168.77.1", "192.168.77.2")


@dataclass(frozen=True)
class Host:
    """One of them: its namespace and its address."""

    namespace: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs this command there."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *command]


def enter(namespace: str) -> None:
    """Let this thread, and the threads that it starts from now on, run in a namespace."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"entering {namespace}")


@cache
def lacks() -> str:
    """Return why there can be none here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root only"
    missing = [program for program in ("ip", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return f"no network namespace can be made here: {made.stderr.strip()}" if made.returncode else ""


def environments(hosts: Sequence[Host], layout: Sequence[int]) -> list[dict[str, str]]:
    """Return the variables with which world.start puts each rank on its host; ``layout`` numbers the hosts by rank."""
    master = hosts[layout[0]].address
    return [{"WORLD_NAMESPACE": hosts[host].namespace, "MASTER_ADDR": master} for host in layout]


@contextmanager
def joined(pair: int = 0) -> Iterator[tuple[Host, Host]]:
    """Make two hosts that reach each other; take them away again, with all that runs there.

    A process that makes several pairs at a time numbers them.
    """
    names = [f"host-{os.getpid()}-{2 * pair + number}" for number in range(len(ADDRESSES))]
    hosts = tuple(Host(name, address) for name, address in zip(names, ADDRESSES, strict=True))
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        first, second = (host.namespace for host in hosts)
        _ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "cable")
            _ip("-n", host.namespace, "link", "set", "cable", "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            running = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True)
            subprocess.run(["kill", "-9", *running.stdout.split()], capture_output=True)
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=120)
