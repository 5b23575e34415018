"""Several hosts on this machine: network namespaces on one switch, whose cables can be cut without a word."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from two_hosts import Host

__all__ = ["Host", "Switch", "connected"]


class Switch:
    """The switch that the hosts are on."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.hosts: list[Host] = []

    def cut(self, host: Host) -> None:
        """Let nothing to or from a host pass any more; no connection is closed."""
        self._set(host, "down")

    def heal(self, host: Host) -> None:
        """Let everything pass again."""
        self._set(host, "up")

    def _set(self, host: Host, state: str) -> None:
        _ip("-n", self.namespace, "link", "set", f"port{self.hosts.index(host)}", state)


@contextmanager
def connected(number: int) -> Iterator[Switch]:
    """Make so many hosts that reach each other; take them away again, with all that runs there."""
    switch = Switch(f"switch-{os.getpid()}")
    try:
        _ip("netns", "add", switch.namespace)
        _ip("-n", switch.namespace, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch.namespace, "link", "set", "bridge", "up")
        for index in range(number):
            host = Host(f"node-{os.getpid()}-{index}", f"192.168.79.{index + 1}")
            switch.hosts.append(host)
            _ip("netns", "add", host.namespace)
            port = f"port{index}"
            _ip(
                "-n",
                switch.namespace,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host.namespace,
            )
            _ip("-n", switch.namespace, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield switch
    finally:
        for host in switch.hosts:
            kill_all(host)
        for namespace in (*(host.namespace for host in switch.hosts), switch.namespace):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def kill_all(host: Host) -> None:
    """Kill everything that runs on a host, at once, as a machine that loses its power does."""
    running = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True)
    subprocess.run(["kill", "-9", *running.stdout.split()], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=120)
