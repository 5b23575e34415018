"""Hosts as network namespaces: functions that run on them, and connections that a firewall would block."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from two_hosts import Host, enter

T = TypeVar("T")

# SYN and ACK, at byte 13 of the header of TCP behind one of IPv4 without options: the answer to a new connection.
_ANSWERS = "match ip protocol 6 0xff match u8 0x12 0x12 at 33"


def in_namespace(host: Host, function: Callable[[], T]) -> T:
    """Return what a function returns in a thread that runs on a host."""
    with ThreadPoolExecutor(1, initializer=enter, initargs=(host.namespace,)) as pool:
        return pool.submit(function).result()


def block_connections_to(host: Host) -> str:
    """Drop the host's answers to new connections; it can still connect to others. Return why that cannot be done here.

    Only tc is needed, with two kinds of its queues and one of its filters, which more machines have than a firewall.
    """
    for command in (
        "qdisc add dev cable root handle 1: htb default 1 r2q 100000",
        "class add dev cable parent 1: classid 1:1 htb rate 10gbit",
        "class add dev cable parent 1: classid 1:2 htb rate 10gbit",
        "qdisc add dev cable parent 1:2 handle 2: bfifo limit 1",  # drops all that is longer than a byte
        f"filter add dev cable parent 1: protocol ip prio 1 u32 {_ANSWERS} flowid 1:2",
    ):
        try:
            done = subprocess.run(host.command(["tc", *command.split()]), capture_output=True, text=True)
        except OSError as error:
            return str(error)
        if done.returncode:
            return f"tc {command}: {done.stderr.strip()}"
    return ""
