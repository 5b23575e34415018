"""Which ranks are on one host: those that have one kernel and one network namespace.

Containers on one machine have network namespaces of their own, and with them addresses of their own; they count as
hosts. So do the hosts that PROCGROUP_HOST_ID makes.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from procgroup.cluster.topology import format_cpus
from procgroup.diagnostics.doctor.system_files import read_text
from procgroup.environ import PROCGROUP_HOST_ID


class Place(NamedTuple):
    """Where one rank runs: a host's name, the machine's boot, the network namespace, and the CPUs of its affinity.

    ``cpus`` are in Linux's form, such as 0-3,8, because all ranks read the places of all.
    """

    host_name: str
    boot: str
    network: int
    host_id: str
    cpus: str

    @classmethod
    def of_this_process(cls, root: Path = Path("/")) -> Place:
        """Return the place of this process."""
        try:
            network = (root / "proc/self/ns/net").stat().st_ino
        except OSError:
            network = 0
        boot = read_text(root / "proc/sys/kernel/random/boot_id")
        return cls(socket.gethostname(), boot, network, PROCGROUP_HOST_ID.get(), format_cpus(os.sched_getaffinity(0)))

    @classmethod
    def from_json(cls, values: list[Any]) -> Place:
        """Return the place that another rank has published."""
        return cls(*values)

    @property
    def identity(self) -> tuple[str, str, int, str]:
        """What the ranks of one host have in common."""
        return (self.host_name, self.boot, self.network, self.host_id)


class Host(NamedTuple):
    """The ranks of one host. The name is unique in the job."""

    name: str
    ranks: tuple[int, ...]
    places: tuple[Place, ...]

    @property
    def leader(self) -> int:
        """The rank that checks the host."""
        return self.ranks[0]


def hosts_of(places: Mapping[int, Place]) -> list[Host]:
    """Return the hosts, in the order of their lowest ranks. Names that several hosts have get these ranks, too."""
    groups: dict[tuple[str, str, int, str], list[int]] = {}
    for rank in sorted(places):
        groups.setdefault(places[rank].identity, []).append(rank)
    names = Counter(identity[0] for identity in groups)
    return [
        Host(
            identity[0] if names[identity[0]] == 1 else f"{identity[0]} (rank {ranks[0]})",
            tuple(ranks),
            tuple(places[rank] for rank in ranks),
        )
        for identity, ranks in groups.items()
    ]
