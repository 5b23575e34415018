"""A Slurm of one node on this machine, from the distribution's packages, for as long as a test needs it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol")
"""What has to be installed: Debian's packages slurmctld, slurmd, slurm-client and munge."""

_SECONDS_TO_START = 30.0

_SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.pid
SlurmdLogFile={folder}/slurmd.log
SlurmdSpoolDir={folder}/slurmd
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
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=4 CoresPerSocket=4 RealMemory=500
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def lacks() -> str:
    """Return what this machine lacks to run one; "" where it lacks nothing."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started by root only"
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


@contextmanager
def running(folder: Path, controller_port: int, node_port: int) -> Iterator[dict[str, str]]:
    """Start Slurm with its files in ``folder``; yield the environment of its commands; end it."""
    for name in ("slurmd", "slurmctld"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    settings = folder / "slurm.conf"
    settings.write_text(
        _SETTINGS.format(folder=folder, host=socket.gethostname(), controller_port=controller_port, node_port=node_port)
    )
    environment = {"SLURM_CONF": str(settings), "PATH": _path()}
    files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    munge = [f"--{flag}={folder / name}" for flag, name in {**files, "log-file": "munged.log"}.items()]
    try:
        for command in (["munged", "--force", *munge], ["slurmctld", "-c"], ["slurmd", "-N", "localhost"]):
            subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True, timeout=30)
        _wait_until_idle({**os.environ, **environment})
        yield environment
    finally:
        for name in ("slurmd", "slurmctld", "munged"):
            with suppress(OSError, ValueError):
                _end(int((folder / f"{name}.pid").read_text()))


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin"


def _wait_until_idle(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while "idle" not in subprocess.run(["sinfo", "-h"], env=environment, capture_output=True, text=True).stdout:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Slurm's node is not idle after {_SECONDS_TO_START:g} s")
        time.sleep(0.1)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 5
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
