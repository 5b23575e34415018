"""From the parsed flags to the command and the assignment of each host's agent. Contradictory flags are refused."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from procgroup.cluster.addresses import Host, parse_endpoints
from procgroup.errors import SshError
from procgroup.launch.deadlines import HOSTS_JOIN_SECONDS, SSH_ALIVE_SECONDS, SSH_CONNECT_SECONDS, SSH_QUERY_SECONDS
from procgroup.launch.flags import NodeRange
from procgroup.launch.hosts.agent_channel import Assignment
from procgroup.launch.nodes.endpoints import source_address
from procgroup.process.environ import (
    PROCGROUP_JOB_KEY,
    PROCGROUP_MASTER,
    PROCGROUP_NOTICE,
    PROCGROUP_REPORT_SOCKET,
    PROCGROUP_STORE,
    PROCGROUP_STORE_KEY,
)
from procgroup.types import Endpoint

EXPORTED_PREFIXES = ("PROCGROUP_", "OMP_", "MKL_", "OPENBLAS_", "NCCL_", "TORCH_", "JAX_", "XLA_", "PYTHON")
"""Variables whose names begin so are exported without --export."""

# Variables of another job, of which this command is itself a rank.
_OF_ANOTHER_JOB = {
    variable.name
    for variable in (PROCGROUP_MASTER, PROCGROUP_NOTICE, PROCGROUP_REPORT_SOCKET, PROCGROUP_STORE, PROCGROUP_STORE_KEY)
}

# Flags of this command alone, and flags that each agent gets with a value of its own.
_NOT_PASSED_ON = {"hosts", "hostfile", "ssh", "ssh_timeout", "chdir", "export", "remote_python", "use_env"} | {
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "master_addr",
}
_REFUSED = {
    "node_rank": "the hosts are numbered in the order of their list",
    "standalone": "that is one node",
    "rdzv_backend": "its agents always meet at one of the hosts",
    "local_addr": "that is the address of one node",
}


@dataclass(frozen=True)
class AgentPlan:
    """How to start the agent of one host."""

    host: Host
    command: Sequence[str]
    assignment: Assignment


@dataclass(frozen=True)
class HostsPlan:
    """How to start a job on several hosts. ``meeting_host`` is the name or address at which the agents meet."""

    agents: Sequence[AgentPlan]
    meeting_host: str
    python: str
    signals: Sequence[signal.Signals]
    start_seconds: float
    shutdown: float | None

    def endpoint(self, port: int) -> str:
        """Return the endpoint at which the agents meet, given the port that the first one has reserved."""
        return str(Endpoint(self.meeting_host, port))


def plan_hosts(options: argparse.Namespace, script_arguments: Sequence[str]) -> HostsPlan:
    """Return the job that the parsed flags describe. Contradictory flags end the program with status 2."""
    hosts: list[Host] = options.hosts or options.hostfile
    _check(options, hosts)
    environment = _environment(options)
    arguments = [*_shared_flags(options, len(hosts)), options.script, *script_arguments]
    try:
        ssh, settings = _ask_ssh(options.ssh, hosts)
        meeting = _meeting_endpoint(options, hosts, settings)
    except (ValueError, SshError) as error:
        options.parser.error(str(error))
    directory = options.chdir
    if not directory:
        # The working directory as the user's path, links unresolved: links may differ between hosts.
        path = os.environ.get("PWD", "")
        directory = path if path and Path(path).is_dir() and Path(path).samefile(Path.cwd()) else str(Path.cwd())
    agents = [
        AgentPlan(
            host,
            _command(options, host, ssh, settings.get(host.name, {}), arguments),
            Assignment(rank, host.label, directory, environment, meeting.port if rank == 0 else None),
        )
        for rank, host in enumerate(hosts)
    ]
    timeouts = (options.ssh_timeout, options.shutdown_timeout)
    return HostsPlan(agents, meeting.host, _python(options), options.signals_to_handle, *timeouts)


def _command(
    options: argparse.Namespace, host: Host, ssh: Ssh | None, settings: Mapping[str, str], arguments: Sequence[str]
) -> list[str]:
    """Return the command that runs the agent of one host."""
    processes = options.texts["nproc_per_node"] if host.slots is None else host.slots
    own = [f"--nproc-per-node={processes}", *arguments]
    if ssh is None or host.is_local:
        return local_command(own)
    return ssh.line(host, settings, remote_command(_python(options), own, os.environ.get("PYTHONPATH", "")))


def _check(options: argparse.Namespace, hosts: Sequence[Host]) -> None:
    for name, why in _REFUSED.items():
        if options.sources[name] != "default":
            options.parser.error(f"{options.sources[name]} and a list of hosts exclude each other: {why}")
    nodes: NodeRange = options.nnodes
    if options.sources["nnodes"] != "default" and (nodes.least, nodes.most) != (len(hosts), len(hosts)):
        said = f"--nnodes is {nodes} ({options.sources['nnodes']})"
        options.parser.error(f"{said}, but the list has {len(hosts)} hosts: omit --nnodes")
    given, source = options.texts["nproc_per_node"], options.sources["nproc_per_node"]
    others = [host for host in hosts if str(host.slots) != given]
    if source != "default" and others and all(host.slots for host in hosts):
        options.parser.error(
            f"--nproc-per-node is {given} ({source}), but each host of the list has its own number, such as "
            f"{others[0].name}:{others[0].slots}: omit one of them"
        )


def _python(options: argparse.Namespace) -> str:
    python: str = options.remote_python or sys.executable
    return python


def _environment(options: argparse.Namespace) -> dict[str, str]:
    try:
        environment = exported_environment(options.export, os.environ, options.sources)
    except ValueError as error:
        options.parser.error(f"--export ({options.sources['export']}): {error}")
    return {**environment, PROCGROUP_JOB_KEY.name: PROCGROUP_JOB_KEY.get() or secrets.token_hex(32)}


def exported_environment(asked: str, base: Mapping[str, str], flags: Collection[str]) -> dict[str, str]:
    """Return the variables of ``base`` that are exported, and those of ``asked``: ``NAME,NAME=VALUE``.

    Variables that set one of the launcher's ``flags`` are left out, because agents get the flags themselves. Raises
    ValueError for an invalid name, and for one that is not set.
    """
    kept_back = _OF_ANOTHER_JOB | {f"PROCGROUP_{flag.upper()}" for flag in flags}
    found = {name: value for name, value in base.items() if name.startswith(EXPORTED_PREFIXES)}
    return {name: value for name, value in found.items() if name not in kept_back} | _asked(asked, base)


def _asked(text: str, base: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not name.isidentifier():
            raise ValueError(f"expected NAME,NAME=VALUE, got the name {name!r}; use NAME for a value with commas")
        if not equals and name not in base:
            raise ValueError(f"{name} is not set here; set it, or write {name}=VALUE")
        found[name] = value if equals else base[name]
    return found


def _shared_flags(options: argparse.Namespace, hosts: int) -> list[str]:
    """Return the flags of every agent: the given ones, and those that make its host a node of the job."""
    given = [
        f"--{name.replace('_', '-')}" + ("" if getattr(options, name) is True else f"={text}")
        for name, text in options.texts.items()
        if options.sources[name] != "default" and name not in _NOT_PASSED_ON and getattr(options, name) is not False
    ]
    conf = ",".join(filter(None, [f"join_timeout={HOSTS_JOIN_SECONDS}", options.texts["rdzv_conf"]]))
    name = options.rdzv_id or secrets.token_hex(8)
    return [f"--nnodes={hosts}", "--rdzv-backend=c10d", f"--rdzv-id={name}", f"--rdzv-conf={conf}", *given]


def _ask_ssh(command: str, hosts: Sequence[Host]) -> tuple[Ssh | None, dict[str, dict[str, str]]]:
    """Return ssh, and its settings for each remote host. Raises SshError."""
    remote = [host for host in hosts if not host.is_local]
    if not remote:
        return None, {}
    ssh = Ssh(command)
    return ssh, {host.name: found for host, found in zip(remote, ssh.settings(remote), strict=True)}


def _meeting_endpoint(
    options: argparse.Namespace, hosts: Sequence[Host], settings: Mapping[str, Mapping[str, str]]
) -> Endpoint:
    """Return the endpoint at which the agents meet; port 0 is any free port of the first host. Raises ValueError."""
    if options.rdzv_endpoint:
        endpoint, *others = parse_endpoints(options.rdzv_endpoint, 0)
        if others:
            raise ValueError(f"expected one --rdzv-endpoint with a list of hosts, got {options.rdzv_endpoint!r}")
        return endpoint
    if options.sources["master_addr"] != "default":
        return Endpoint(options.master_addr, 0)
    addresses = [found.get("hostname") or name for name, found in settings.items()]
    if not hosts[0].is_local:
        return Endpoint(addresses[0], 0)
    # This machine, at its address on the route to the next host.
    return Endpoint(source_address(Endpoint(addresses[0], 22)) if addresses else "127.0.0.1", 0)


AGENT_MODULE = "procgroup.launch.remote_agent"
"""The module that runs on each host."""


class Ssh:
    """The ssh command line that the user gave, such as ``ssh -p 2222``. Raises SshError without such a program.

    Keys, aliases, users, ports and jump hosts come from ssh's configuration. Three settings are added: BatchMode, so
    that ssh does not prompt, and, unless the configuration sets them, timeouts for connecting and for a silent host.
    """

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise SshError(f"--ssh {command!r} is not a valid command line: {error}") from error
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
