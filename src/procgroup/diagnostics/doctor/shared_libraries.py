"""Find shared libraries as files, and ask them for their versions and GPUs, each in a separate process.

A library may be built for another system, wait for a device or end its process; none of this reaches this process.
A driver also takes some of a GPU's memory. This file is the program of that process, too::

    python shared_libraries.py nccl|mpi FILE                           prints the version of a library
    python -m procgroup.diagnostics.doctor.shared_libraries driver     prints a GpuDriver as JSON
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_SECONDS = 20
_DRIVER_SECONDS = 60
"""The driver's start takes seconds where nothing keeps it awake, and longer with many GPUs."""
_LONGEST_TEXT = 100
_MPI_TEXT_BYTES = 8192  # MPI_MAX_LIBRARY_VERSION_STRING of MPICH, the largest
_OF_SYSTEM = ("usr/lib", "usr/lib64", "usr/lib/*-linux-gnu", "usr/local/lib", "usr/local/lib64", "usr/local/cuda/lib64")
_OF_MPI = ("usr/lib/*-linux-gnu/openmpi/lib", "usr/lib64/openmpi/lib", "usr/lib64/mpich/lib", "opt/*/lib")
_OF_DRIVER = ("usr/lib/wsl/lib", "usr/local/nvidia/lib64")


class GpuDescription(NamedTuple):
    """One GPU; ``reaches`` has the numbers of those whose memory it reads and writes without the host."""

    name: str
    has_gate: bool
    reaches: Sequence[int]


class GpuDriver(NamedTuple):
    """The version of CUDA that the driver is for, and the GPUs by number; or why there are none."""

    cuda: str
    gpus: Sequence[GpuDescription]
    error: str = ""


def find(patterns: Iterable[str], environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[Path]:
    """Return the files that match one of the patterns where libraries are, without links to the same file.

    These are LD_LIBRARY_PATH, the wheels of NVIDIA and of MPI in this Python, and the directories of the system.
    """
    found: dict[Path, Path] = {}
    for directory in _directories(environment, root):
        for pattern in patterns:
            for path in sorted(directory.glob(pattern)):
                found.setdefault(path.resolve(), path)
    return list(found.values())


def loaded(name: str, maps: Path = Path("/proc/self/maps")) -> list[Path]:
    """Return the files of this process's libraries whose names begin like this: those of LD_PRELOAD."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = {Path(words[5]) for line in lines if len(words := line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if path.name.startswith(name))


def version(kind: str, file: Path) -> str:
    """Return the version that a library of this kind ("nccl" or "mpi") gives, or why it gives none, in parentheses."""
    try:
        done = _run(["-I", "-S", __file__, kind, str(file)], _SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return f"(no version: {type(error).__name__})"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode == 0 and lines:
        return lines[0]
    return f"(no version: {lines[-1] if lines else f'exit status {done.returncode}'})"


def is_here(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> bool:
    """Return whether this process has loaded the driver's library, or would find it."""
    is_loaded = root == Path("/") and hasattr(ctypes.CDLL(None), "cuInit")
    return is_loaded or bool(find(["libcuda.so.1"], environment, root))


def describe() -> GpuDriver:
    """Return what the driver says of this process's GPUs; an ``error`` where it does not answer."""
    try:
        done = _run(["-m", __name__, "driver"], _DRIVER_SECONDS)
        cuda, gpus, error = json.loads(done.stdout.strip().rpartition("\n")[2])
        return GpuDriver(cuda, [GpuDescription(*one) for one in gpus], error)
    except subprocess.TimeoutExpired:
        return GpuDriver("", (), f"it does not answer within {_DRIVER_SECONDS} s")
    except (OSError, ValueError):
        return GpuDriver("", (), f"it ends its process: {(done.stderr.strip().splitlines() or ['exit status'])[-1]}")


def _run(arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)


def _directories(environment: Mapping[str, str], root: Path) -> Iterator[Path]:
    yield from map(Path, filter(None, environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    if root == Path("/"):  # a host that a test has made up has no Python
        for entry in filter(None, sys.path):
            yield from sorted(Path(entry).glob("nvidia/*/lib"))
        yield Path(sys.prefix) / "lib"
    for pattern in (*_OF_SYSTEM, *_OF_MPI, *_OF_DRIVER):
        yield from sorted(root.glob(pattern))


def _nccl_version(library: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _mpi_version(library: ctypes.CDLL) -> str:
    text, length = ctypes.create_string_buffer(_MPI_TEXT_BYTES), ctypes.c_int()
    library.MPI_Get_library_version(text, ctypes.byref(length))
    line = " ".join(text.value.decode(errors="replace").splitlines()[0].split())
    return line.partition(",")[0].replace("Version:", "")[:_LONGEST_TEXT].replace("  ", " ")


_VERSIONS = {"nccl": _nccl_version, "mpi": _mpi_version}


def _driver_here() -> str:
    """Return the driver's description of the GPUs of this process as JSON."""
    from procgroup import _native

    try:
        count = _native.count_gpus()
        gpus = [
            GpuDescription(
                _native.gpu_name(number),
                _native.has_gate(number),
                [other for other in range(count) if other != number and _native.can_reach(number, other)],
            )
            for number in range(count)
        ]
        version = _native.cuda_version()
        return json.dumps(GpuDriver(f"{version // 1000}.{version % 1000 // 10}", gpus))
    except RuntimeError as error:
        return json.dumps(GpuDriver("", (), str(error)))


def _main(arguments: Sequence[str]) -> int:
    kind, *files = arguments
    try:
        print(_driver_here() if kind == "driver" else _VERSIONS[kind](ctypes.CDLL(files[0])))
    except (OSError, AttributeError, IndexError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
