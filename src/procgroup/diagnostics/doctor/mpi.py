"""The MPI libraries and the mpiexec of this host."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from procgroup.diagnostics.doctor import shared_libraries
from procgroup.diagnostics.doctor.findings import Finding, note, ok, warning
from procgroup.diagnostics.doctor.software import installed_version

_FILES = ("libmpi.so.*[0-9]", "libmpich.so.*[0-9]")


def check(
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    version_of: Callable[[str], str] = installed_version,
    version_of_library: Callable[[str, Path], str] = shared_libraries.version,
) -> Iterator[Finding]:
    """Yield findings about MPI. Where there is none, these are notes."""
    libraries = shared_libraries.find(_FILES, environment, root)
    for file in libraries:
        yield ok(f"{version_of_library('mpi', file)} at {file}")
    launcher = _mpiexec(environment)
    if launcher:
        yield ok(f"mpiexec at {launcher}")
    if not libraries and version_of("mpi4py"):
        yield note(
            "mpi4py is installed, but no MPI library is found: pip install mpich, or load a module of this system"
        )
    elif not libraries:
        yield note("no MPI library is found")
    if len(libraries) > 1 and version_of("mpi4py"):
        yield warning(
            f"{len(libraries)} MPI libraries are found: mpi4py may load another one than that of mpiexec",
            "Start programs with the mpiexec beside the library that is meant, or name its libmpi in MPI4PY_LIBMPI",
        )


def _mpiexec(environment: Mapping[str, str]) -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec", path=environment.get("PATH"))
