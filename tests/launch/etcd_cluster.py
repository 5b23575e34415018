"""An etcd cluster with one member on each of several hosts: its leader, and members that stop, end and start again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import database_servers
from bridged_hosts import Host
from launch.agents import wait_until

PORT = 2379

_STATUS = (
    "import sys, urllib.request as u;"
    "print(u.urlopen(u.Request(sys.argv[1], b'{}', method='POST'), timeout=2).read().decode())"
)


class EtcdCluster:
    """The members, by their hosts."""

    def __init__(self, folder: Path, hosts: Sequence[Host]) -> None:
        self._folder = folder
        self.hosts = list(hosts)
        self.members: dict[Host, subprocess.Popen[bytes]] = {}
        self._hosts_by_id: dict[str, Host] = {}

    def start(self, host: Host) -> None:
        """Start the member of a host, with the files of an earlier one; the earlier one has ended."""
        if host in self.members:
            self.members[host].wait()
        self.members[host] = database_servers.etcd_member_on(host, self._folder, PORT, self.hosts)

    def wait_for_leader(self, among: Sequence[Host] | None = None) -> Host:
        """Wait until the members of some hosts know the same leader, and return its host."""
        leaders: list[Host | None] = []

        def is_known() -> bool:
            leaders[:] = [self._leader_of(host) for host in among or self.hosts]
            return None not in leaders and len(set(leaders)) == 1

        wait_until(is_known, 30, lambda: f"leaders: {leaders}")
        assert leaders[0] is not None
        return leaders[0]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every member, as one that stops or continues it."""
        for member in self.members.values():
            member.send_signal(number)

    def endpoints(self, first: Host) -> str:
        """Return the endpoints of all members, with that of one host in front."""
        return ",".join(f"{host.address}:{PORT}" for host in [first, *(each for each in self.hosts if each != first)])

    def _leader_of(self, host: Host) -> Host | None:
        """Return the host whose member is the leader, as a host's own member knows it."""
        url = f"http://{host.address}:{PORT}/v3/maintenance/status"
        asked = subprocess.run(host.command([sys.executable, "-I", "-S", "-c", _STATUS, url]), capture_output=True)
        if asked.returncode:
            return None
        status = json.loads(asked.stdout)
        self._hosts_by_id[status["header"]["member_id"]] = host
        return self._hosts_by_id.get(status.get("leader", ""))


@contextmanager
def running_on(hosts: Sequence[Host], folder: Path) -> Iterator[EtcdCluster]:
    """Start a member on each host, wait for their leader, and kill them at the end."""
    folder.mkdir()
    cluster = EtcdCluster(folder, hosts)
    try:
        for host in hosts:
            cluster.start(host)
        cluster.wait_for_leader()
        yield cluster
    finally:
        for member in cluster.members.values():
            member.kill()
            member.wait()
