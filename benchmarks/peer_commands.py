"""How each peer is started: through its own launcher, in its own environment."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import setup_peers

from procgroup.diagnostics.bench.peer import PeerCommand
from procgroup.diagnostics.bench.protocol import PeerFailure

HERE = Path(__file__).resolve().parent

# One thread per rank everywhere; and no peer looks for a network.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def procgroup(ranks: int) -> PeerCommand:
    return _procgroup("procgroup", ranks)


def procgroup_symmetric(ranks: int) -> PeerCommand:
    return _procgroup("procgroup-symmetric", ranks, "--symmetric")


def procgroup_tcp(ranks: int) -> PeerCommand:
    command = _procgroup("procgroup-tcp", ranks)
    return replace(command, environment={**ENVIRONMENT, "PROCGROUP_TRANSPORT": "tcp"})


def gloo(ranks: int) -> PeerCommand:
    python = _python_of("gloo")
    return PeerCommand("gloo", [python, str(HERE / "peers" / "gloo_peer.py"), "{socket}", str(ranks)], ENVIRONMENT)


def mpich(ranks: int) -> PeerCommand:
    return PeerCommand("mpich", _mpiexec("mpich", ranks, []), ENVIRONMENT)


def openmpi(ranks: int) -> PeerCommand:
    # Left alone it binds 2 ranks to cores; here --pin decides that for all peers alike.
    flags = ["--oversubscribe", "--bind-to", "none"]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return PeerCommand("openmpi", _mpiexec("openmpi", ranks, [*as_root, *flags]), ENVIRONMENT)


def limit(ranks: int) -> PeerCommand:
    return PeerCommand("limit", [str(_built_limit()), "{socket}", str(ranks)], {})


DEFAULT_PEERS = ("procgroup", "gloo", "mpich", "openmpi", "limit")
PEERS: dict[str, Callable[[int], PeerCommand]] = {
    "procgroup": procgroup,
    "gloo": gloo,
    "mpich": mpich,
    "openmpi": openmpi,
    "limit": limit,
    "procgroup-symmetric": procgroup_symmetric,
    "procgroup-tcp": procgroup_tcp,
}


def _procgroup(name: str, ranks: int, *flags: str) -> PeerCommand:
    if importlib.util.find_spec("procgroup.__main__") is None:
        raise PeerFailure(name, "the installed procgroup has no command line")
    run = [sys.executable, "-m", "procgroup", "run", "--nproc-per-node", str(ranks)]
    return PeerCommand(name, [*run, str(HERE / "peers" / "procgroup_peer.py"), "{socket}", *flags], ENVIRONMENT)


def _python_of(name: str) -> str:
    if not setup_peers.set_up(name):
        raise PeerFailure(name, "its environment could not be made")
    return str(setup_peers.PEERS / name / "bin" / "python")


def _mpiexec(name: str, ranks: int, flags: list[str]) -> list[str]:
    python = _python_of(name)
    mpiexec = str(Path(python).with_name("mpiexec"))
    return [mpiexec, *flags, "-n", str(ranks), python, str(HERE / "peers" / "mpi_peer.py"), "{socket}"]


def _built_limit() -> Path:
    """Compile limit.cpp for this very processor, unless that was done since it last changed."""
    source, program = HERE / "limit.cpp", setup_peers.PEERS / "limit"
    if program.exists() and program.stat().st_mtime > source.stat().st_mtime:
        return program
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise PeerFailure("limit", "no C++ compiler; install g++ or name one in CXX")
    program.parent.mkdir(parents=True, exist_ok=True)
    build = [compiler, "-std=c++20", "-O3", "-march=native", str(source), "-o", str(program)]
    outcome = subprocess.run(build, stderr=subprocess.PIPE, text=True, check=False)
    if outcome.returncode != 0:
        raise PeerFailure("limit", f"limit.cpp does not compile:\n{outcome.stderr.strip()}")
    return program
