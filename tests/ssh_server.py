"""An OpenSSH server on the loopback addresses, for tests that start processes on "other hosts".

It has a configuration, keys and a port of its own, runs as the user who runs the tests, and lets in only whoever has
the key beside it.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

import world

PROGRAM = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin") or ""
HOSTS = {"host1": "127.0.0.1", "host2": "127.0.0.2"}
"""The names by which ssh knows the addresses of the server; "nowhere" is one at which nothing listens."""

_START_SECONDS = 20.0

_SERVER = """\
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
"""
_CLIENT = """\
Host nowhere
  HostName 127.0.0.1
  Port {unused}
{hosts}
Host *
  Port {port}
  User {user}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  HostKeyAlias server
"""


@dataclass(frozen=True)
class SshServer:
    """A running server. ``ssh`` is the command that reaches it."""

    ssh: str
    process: subprocess.Popen[bytes]

    def sessions(self) -> list[psutil.Process]:
        """Return the processes of the server's connections, and what runs in them."""
        return psutil.Process(self.process.pid).children(recursive=True)


def lacks() -> str:
    """Return why there can be no server here; "" where there can."""
    missing = [name for name, found in (("sshd", PROGRAM), ("ssh", shutil.which("ssh"))) if not found]
    if missing:
        return f"not installed: {', '.join(missing)} (openssh-server)"
    if os.geteuid() == 0 and not Path("/run/sshd").is_dir():
        with contextlib.suppress(OSError):
            Path("/run/sshd").mkdir(mode=0o755)  # a server of root insists on it
    return ""


@contextlib.contextmanager
def running(folder: Path) -> Iterator[SshServer]:
    """Run a server whose files are in ``folder``; end it with all that runs in its connections."""
    port, unused = world.free_port(), world.free_port()
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "sshd_config").write_text(_SERVER.format(port=port, folder=folder))
    hosts = "".join(f"Host {name}\n  HostName {address}\n" for name, address in HOSTS.items())
    client = _CLIENT.format(port=port, unused=unused, folder=folder, hosts=hosts, user=getpass.getuser())
    (folder / "ssh_config").write_text(client)
    (folder / "known_hosts").write_text(f"server {(folder / 'host_key.pub').read_text()}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    server = SshServer(f"ssh -F {folder}/ssh_config", process)
    try:
        _wait_until_it_answers(process, port, folder / "log")
        yield server
    finally:
        left = server.sessions() if process.poll() is None else []
        for each in [process, *left]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.2", port), 1) as probe:
            if probe.recv(4) == b"SSH-":
                return
        assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.02)
