"""A Slurm on this machine, from the distribution's packages, for as long as a test needs it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol")
"""What has to be installed: Debian's packages slurmctld, slurmd, slurm-client and munge."""

_SECONDS_TO_START = 30.0

_SETTINGS = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort={controller_port}
FirstJobId={first_job}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/slurmd.%n
StateSaveLocation={folder}/slurmctld
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
TreeWidth=64
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def lacks() -> str:
    """Return what this machine lacks to run one; "" where it lacks nothing."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started by root only"
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Node:
    """A node of the cluster: its name, its line of slurm.conf, and the command before each daemon that runs on it."""

    name: str
    settings: str
    prefix: tuple[str, ...] = ()


@contextmanager
def running(folder: Path, controller_port: int, node_port: int) -> Iterator[dict[str, str]]:
    """Start Slurm with its files in ``folder``; yield the environment of its commands; end it."""
    host = socket.gethostname()
    node = Node("localhost", f"NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port}")
    with running_on(folder, [node], f"{host}(127.0.0.1)", controller_port) as environment:
        yield environment


@contextmanager
def running_on(folder: Path, nodes: Sequence[Node], controller: str, controller_port: int) -> Iterator[dict[str, str]]:
    """Start Slurm on these nodes, its controller on the first; yield the environment of its commands; end it."""
    for name in ("slurmctld", *(f"slurmd.{node.name}" for node in nodes)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    lines = [f"NodeName={node.name} {node.settings} CPUs=4 CoresPerSocket=4 RealMemory=500" for node in nodes]
    settings = folder / "slurm.conf"
    # Jobs of one number meet at one port: clusters that share this machine need numbers of their own.
    first_job = 1 + secrets.randbelow(1_000_000)
    names = {"folder": folder, "controller": controller, "controller_port": controller_port, "first_job": first_job}
    settings.write_text(_SETTINGS.format(**names, nodes="\n".join(lines)))
    environment = {"SLURM_CONF": str(settings), "PATH": _path()}
    files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    munge = [f"--{flag}={folder / name}" for flag, name in {**files, "log-file": "munged.log"}.items()]
    daemons = [["munged", "--force", *munge], [*nodes[0].prefix, "slurmctld", "-c"]]
    daemons += [[*node.prefix, "slurmd", "-N", node.name] for node in nodes]
    try:
        for command in daemons:
            subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True, timeout=120)
        _wait_until_idle([*nodes[0].prefix], {**os.environ, **environment}, len(nodes))
        yield environment
    finally:
        for path in (*folder.glob("slurmd.*.pid"), folder / "slurmctld.pid", folder / "munged.pid"):
            with suppress(OSError, ValueError):
                _end(int(path.read_text()))


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin"


def _wait_until_idle(prefix: list[str], environment: dict[str, str], nodes: int) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    command = [*prefix, "sinfo", "-h", "-N", "-t", "idle"]
    while len(subprocess.run(command, env=environment, capture_output=True, text=True).stdout.splitlines()) < nodes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Slurm's {nodes} nodes are not idle after {_SECONDS_TO_START:g} s")
        time.sleep(0.1)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 5
    with suppress(psutil.NoSuchProcess):
        daemon = psutil.Process(pid)
        # Where nothing reaps what the machine's first process inherits, an ended daemon stays as a zombie.
        while time.monotonic() < deadline and daemon.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)
        daemon.kill()
