"""The peers that can be measured here: procgroup, and what is installed beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from procgroup.diagnostics.bench.peer import PeerCommand
from procgroup.errors import PeerFailure

# One thread per rank everywhere; and no peer looks for a network.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
MODULES = "procgroup.diagnostics.bench.peers"

StartPeer = Callable[[int], PeerCommand]


def procgroup(ranks: int, name: str = "procgroup", *flags: str, **environment: str) -> PeerCommand:
    """Return how to start procgroup's ranks, with flags of ``procgroup_peer`` and with environment variables."""
    run = [sys.executable, "-m", "procgroup", "run", "-n", str(ranks), "-m", f"{MODULES}.procgroup_peer"]
    return PeerCommand(name, [*run, "{socket}", *flags], {**ENVIRONMENT, **environment})


def gloo(ranks: int) -> PeerCommand:
    """Return how to start Gloo through the PyTorch of this environment. Raises PeerFailure where there is none."""
    if find_spec("torch") is None:
        raise PeerFailure("gloo", "PyTorch, which brings Gloo, is not installed: pip install torch")
    return gloo_command(sys.executable, ranks)


def over_mpi(command: PeerCommand) -> PeerCommand:
    """Return how to start procgroup over MPI, given how mpi4py is started."""
    arguments = [argument.replace(".mpi_peer", ".procgroup_peer") for argument in command.arguments]
    return replace(command, arguments=[*arguments, "--mpi"])


def by_mpiexec(ranks: int, name: str = "mpi") -> PeerCommand:
    """Return how to start mpi4py with the mpiexec of this environment. Raises PeerFailure without one of them."""
    if find_spec("mpi4py") is None:
        raise PeerFailure(name, "mpi4py is not installed: pip install mpi4py mpich")
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise PeerFailure(name, "there is no mpiexec: pip install mpich, or install your system's MPI")
    said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return mpi_command(name, mpiexec, sys.executable, ranks, is_open_mpi="open" in said.lower())


PEERS: Mapping[str, StartPeer] = {
    "procgroup": procgroup,
    "gloo": gloo,
    "mpi": by_mpiexec,
    "procgroup-symmetric": lambda ranks: procgroup(ranks, "procgroup-symmetric", "--symmetric"),
    "procgroup-tcp": lambda ranks: procgroup(ranks, "procgroup-tcp", PROCGROUP_TRANSPORT="tcp"),
    "procgroup-mpi": lambda ranks: over_mpi(by_mpiexec(ranks, "procgroup-mpi")),
}
DEFAULT_PEERS = ("procgroup", "gloo", "mpi")


def gloo_command(python: str, ranks: int) -> PeerCommand:
    """Return how to start Gloo's ranks with this interpreter."""
    return PeerCommand("gloo", [python, "-m", f"{MODULES}.gloo_peer", "{socket}", str(ranks)], ENVIRONMENT)


def mpi_command(name: str, mpiexec: str, python: str, ranks: int, *, is_open_mpi: bool) -> PeerCommand:
    """Return how to start the ranks of an MPI library with this mpiexec and interpreter."""
    flags = []
    if is_open_mpi:
        # Left alone it binds 2 ranks to cores; here --pin decides that for all peers alike.
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        flags = [*as_root, "--oversubscribe", "--bind-to", "none"]
    program = [python, "-m", f"{MODULES}.mpi_peer", "{socket}"]
    return PeerCommand(name, [mpiexec, *flags, "-n", str(ranks), *program], ENVIRONMENT)
