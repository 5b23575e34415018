"""How each peer is started: through its own launcher, in its own environment."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import setup_peers

from procgroup.diagnostics.bench import installed
from procgroup.diagnostics.bench.installed import StartPeer, gloo_command, mpi_command, over_mpi, procgroup
from procgroup.diagnostics.bench.peer import PeerCommand
from procgroup.errors import PeerFailure

HERE = Path(__file__).resolve().parent


def gloo(ranks: int) -> PeerCommand:
    return with_sources(gloo_command(python_of("gloo"), ranks))


def mpich(ranks: int) -> PeerCommand:
    return _mpi("mpich", ranks)


def openmpi(ranks: int) -> PeerCommand:
    return _mpi("openmpi", ranks)


def procgroup_mpich(ranks: int) -> PeerCommand:
    return _over_mpi("mpich", ranks)


def procgroup_openmpi(ranks: int) -> PeerCommand:
    return _over_mpi("openmpi", ranks)


def limit(ranks: int) -> PeerCommand:
    return PeerCommand("limit", [str(_built_limit()), "{socket}", str(ranks)], {}, only_float32=True)


def wheel(name: str, file: Path) -> StartPeer:
    """Return a peer that is procgroup as a wheel has it, in an environment of its own."""

    def start(ranks: int) -> PeerCommand:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        if not setup_peers.set_up(name, [str(file.resolve()), "numpy"], content):
            raise PeerFailure(name, "its environment could not be made")
        python = str(setup_peers.PEERS / name / "bin" / "python")
        command = procgroup(ranks)
        return replace(command, name=name, arguments=[python, *command.arguments[1:]])

    return start


DEFAULT_PEERS = ("procgroup", "gloo", "mpich", "openmpi", "limit")
PEERS: Mapping[str, StartPeer] = {
    "procgroup": procgroup,
    "gloo": gloo,
    "mpich": mpich,
    "openmpi": openmpi,
    "limit": limit,
    "procgroup-symmetric": installed.PEERS["procgroup-symmetric"],
    "procgroup-tcp": installed.PEERS["procgroup-tcp"],
    "procgroup-mpich": procgroup_mpich,
    "procgroup-openmpi": procgroup_openmpi,
}


def _mpi(name: str, ranks: int) -> PeerCommand:
    python = python_of(name)
    mpiexec = str(Path(python).with_name("mpiexec"))
    return with_sources(mpi_command(name, mpiexec, python, ranks, is_open_mpi=name == "openmpi"))


def _over_mpi(mpi: str, ranks: int) -> PeerCommand:
    """Return how to start procgroup, as it is installed here, over the MPI library of a peer's environment."""
    python = Path(python_of(mpi))
    command = mpi_command(
        f"procgroup-{mpi}", str(python.with_name("mpiexec")), sys.executable, ranks, is_open_mpi=mpi == "openmpi"
    )
    library = {"LD_LIBRARY_PATH": str(python.parent.parent / "lib"), "MPI4PY_MPIABI": mpi}
    return over_mpi(replace(command, environment={**command.environment, **library}))


def with_sources(command: PeerCommand) -> PeerCommand:
    """Let a peer's own environment find the rank's side of the benchmark, which needs procgroup's sources only."""
    return replace(command, environment={**command.environment, "PYTHONPATH": str(HERE.parent / "src")})


def python_of(name: str) -> str:
    """Return the interpreter of a peer's environment, which is made first. Raises PeerFailure where it cannot be."""
    if not setup_peers.set_up(name):
        raise PeerFailure(name, "its environment could not be made")
    return str(setup_peers.PEERS / name / "bin" / "python")


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
