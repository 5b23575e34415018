"""OpenSSH's client: its settings for a host, and the command that starts an agent there.

Keys, aliases, users, ports and jump hosts come from ssh's configuration. Three settings are added: BatchMode, so that
ssh does not prompt, and, unless the configuration sets them, timeouts for connecting and for a silent host.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from procgroup.cluster.addresses import Host
from procgroup.errors import SshError
from procgroup.launch.deadlines import SSH_ALIVE_SECONDS, SSH_CONNECT_SECONDS, SSH_QUERY_SECONDS

AGENT_MODULE = "procgroup.launch.hosts.remote_agent"
"""The module that runs on each host."""


class Ssh:
    """The ssh command line that the user gave, such as ``ssh -p 2222``. Raises SshError without such a program."""

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise SshError(f"--ssh {command!r} is no command line: {error}") from error
        if not self._words or shutil.which(self._words[0]) is None:
            name = self._words[0] if self._words else command
            raise SshError(f"there is no program {name!r}: install OpenSSH's client, or name another by --ssh")

    def settings(self, hosts: Sequence[Host]) -> list[dict[str, str]]:
        """Return ssh's settings for each host, by lower-case name. Raises SshError."""
        queries: list[subprocess.Popen[str]] = []
        try:
            queries.extend(map(self._query, hosts))
            return [_answer(host, query) for host, query in zip(hosts, queries, strict=True)]
        except OSError as error:
            raise SshError(
                f"cannot run {self._words[0]} -G for each of {len(hosts)} hosts at a time: {error.strerror}; raise the "
                "limits on open files and processes (ulimit -n, ulimit -u)"
            ) from error
        finally:
            for query in queries:
                query.kill()
                query.communicate()

    def _query(self, host: Host) -> subprocess.Popen[str]:
        command = [*self._words, "-G", host.name]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)

    def line(self, host: Host, settings: Mapping[str, str], remote_command: str) -> list[str]:
        """Return the command that runs ``remote_command``, a line for the host's shell, on a host."""
        added = ["-T", "-o", "BatchMode=yes"]
        if settings.get("connecttimeout", "none") in ("none", "0"):
            added += ["-o", f"ConnectTimeout={SSH_CONNECT_SECONDS}"]
        if settings.get("serveraliveinterval", "0") == "0":
            added += ["-o", f"ServerAliveInterval={SSH_ALIVE_SECONDS}"]
        return [*self._words, *added, "--", host.name, remote_command]


def local_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs the agent on this machine, without ssh."""
    return [sys.executable, "-m", AGENT_MODULE, *arguments]


def remote_command(python: str, arguments: Sequence[str], python_path: str) -> str:
    """Return the command line, for any login shell, that runs the agent. ``python_path`` is its PYTHONPATH."""
    absolute = os.pathsep.join(os.path.abspath(entry) for entry in python_path.split(os.pathsep) if entry)  # noqa: PTH100
    environment = ["env", f"PYTHONPATH={absolute}"] if absolute else []
    return "exec " + shlex.join([*environment, python, "-m", AGENT_MODULE, *arguments])


def _answer(host: Host, query: subprocess.Popen[str]) -> dict[str, str]:
    try:
        said, complaint = query.communicate(timeout=SSH_QUERY_SECONDS)
    except subprocess.TimeoutExpired:
        raise SshError(f"{host.name}: ssh -G has not answered within {SSH_QUERY_SECONDS:g} s") from None
    if query.returncode:
        raise SshError(f"{host.name}: {complaint.strip() or f'ssh -G ended with status {query.returncode}'}")
    pairs = (line.partition(" ") for line in said.splitlines())
    return {name.lower(): value for name, _, value in pairs}
