"""Python, procgroup with its native module, optional libraries and MPI: their versions."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from procgroup import __version__
from procgroup.diagnostics.doctor import shared_libraries
from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning

OPTIONAL: Mapping[str, tuple[Sequence[str], str]] = {
    "torch": (("torch",), "PyTorch's tensors and modules"),
    "jax": (("jax",), "JAX's arrays and compiled functions"),
    "cupy": (("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"), "CuPy's arrays"),
    "mpi4py": (("mpi4py",), 'the backend "mpi"'),
    "nvidia-nccl": (("nvidia-nccl-cu13", "nvidia-nccl-cu12"), 'the backend "nccl"'),
}
"""Optional libraries: the names of their distributions, and what they are needed for."""


def installed_version(name: str) -> str:
    """Return the version of an installed distribution; "" where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def versions(version_of: Callable[[str], str] = installed_version) -> dict[str, str]:
    """Return the versions of procgroup, Python, NumPy and the optional libraries that are installed."""
    found = {"procgroup": __version__, "Python": platform.python_version(), "numpy": version_of("numpy")}
    for library, (distributions, _) in OPTIONAL.items():
        found[library] = next(filter(None, map(version_of, distributions)), "")
    return {name: version for name, version in found.items() if version}


def check(version_of: Callable[[str], str] = installed_version) -> Iterator[Finding]:
    """Yield findings about Python, procgroup and the libraries that it uses."""
    found = versions(version_of)
    yield ok(f"Python {found['Python']} ({sys.executable}), procgroup {found['procgroup']}")
    yield from _native_module()
    if "numpy" not in found:
        yield problem("NumPy, which procgroup needs, is not installed", "Install it: pip install numpy")
    libraries = [f"{name} {found[name]}" for name in ("numpy", *OPTIONAL) if name in found]
    if libraries:
        yield ok(f"installed: {', '.join(libraries)}")
    missing = [f"{name} (for {use})" for name, (_, use) in OPTIONAL.items() if name not in found]
    if missing:
        yield note(f"not installed: {', '.join(missing)}")


def _native_module() -> Iterator[Finding]:
    try:
        from procgroup import _native  # noqa: F401 - whether it can be loaded is the question
    except ImportError as error:
        yield problem(
            f"procgroup's native module cannot be loaded: {error}",
            "Install procgroup for this Python and this processor: pip install --force-reinstall procgroup",
        )


_FILES = ("libmpi.so.*[0-9]", "libmpich.so.*[0-9]")


def check_mpi(
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
