"""Build and load stand-ins for libcuda.so.1 and libnccl.so.2, so that procgroup and nccl4py find them without a GPU.

A world's ranks are forked, and a library path has no effect on a process that runs already; hence they load the
libraries before they import nccl or cuda::

    def program(rank, size):
        stand_ins.load()
        import nccl.core

    run(program, 2, environment={"PROCGROUP_STAND_IN_GPUS": "2"})

A program that a test starts finds them by its environment::

    run_command([sys.executable, "program.py"], environment=stand_ins.environment(gpus=2))

Variables of the GPUs (see cuda_device.hpp), with their defaults::

    PROCGROUP_STAND_IN_GPUS=1           the number of GPUs; a process sees all, or those in CUDA_VISIBLE_DEVICES
    PROCGROUP_STAND_IN_DELAY_US=0       delays each operation of a stream
    PROCGROUP_STAND_IN_BURST_US=0       streams begin work only at multiples of so many microseconds, and then all of it
    PROCGROUP_STAND_IN_CHANNELS=0       so many queues run the work of all streams of a device and priority; 0: no limit
    PROCGROUP_STAND_IN_STRICT_EVENTS=0  1: to record an event whose last recording is not reached yet is a fault
    PROCGROUP_STAND_IN_FREES_BLOCK=0       1: queries of streams and events wait while NCCL frees communicators
    PROCGROUP_STAND_IN_NO_PEER_ACCESS=0    1: no GPU reads the memory of another one
    PROCGROUP_STAND_IN_NO_STREAM_MEMORY_OPERATIONS=0  1: streams neither wait for words of memory nor write them

and of NCCL (see nccl_api.cpp)::

    PROCGROUP_STAND_IN_NCCL_FAIL=          requests errors
    PROCGROUP_STAND_IN_NCCL_LATE_ABORT=0   1: a kernel that begins after an abort spoils its receive buffer
    PROCGROUP_STAND_IN_NCCL_VERSION=22807  what ncclGetVersion returns

All are read once, at their first use, except for the last. NCCL_HOSTID and NCCL_MULTI_RANK_GPU_ENABLE are NCCL's own.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).resolve().parent
_BUILDS = _SOURCES.parents[1] / "build" / "stand-ins"
_LIBRARIES = ("libcuda.so.1", "libnccl.so.2")
_FLAGS = ("-std=c++20", "-O1", "-fwrapv", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra")
_UNUSED = "-Wno-missing-field-initializers"  # fields left out are meant to be zero


def build() -> Path:
    """Return the folder with both libraries; compile them where the sources changed."""
    folder = _BUILDS / _fingerprint()
    if folder.is_dir():
        return folder
    _BUILDS.mkdir(parents=True, exist_ok=True)
    with (_BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that test at the same time compile once
        if not folder.is_dir():
            _build_in(folder)
    return folder


def _build_in(folder: Path) -> None:
    unfinished = Path(tempfile.mkdtemp(dir=_BUILDS))
    try:
        _compile("libcuda.so.1", unfinished, "cuda_driver.cpp", "-ldl")
        nccl = map(str, _SOURCES.glob("nccl_*.cpp"))
        _compile("libnccl.so.2", unfinished, *nccl, "-Wl,-rpath,$ORIGIN", str(unfinished / "libcuda.so.1"))
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load() -> None:
    """Load both libraries into this process, before anything else loads the real ones."""
    folder = build()
    for name in _LIBRARIES:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def environment(gpus: int = 1) -> dict[str, str]:
    """Return the variables with which a new process finds the libraries, also where the real ones are installed."""
    folder = build()
    before = os.environ.get("LD_PRELOAD", "").split()
    preloaded = [*(str(folder / name) for name in _LIBRARIES), *before]
    return {"LD_PRELOAD": " ".join(preloaded), "PROCGROUP_STAND_IN_GPUS": str(gpus)}


def _compile(library: str, folder: Path, *arguments: str) -> None:
    compiler = os.environ.get("CXX", "g++")
    output = ("-o", str(folder / library), f"-Wl,-soname,{library}")
    done = subprocess.run(
        [compiler, *_FLAGS, _UNUSED, *output, *arguments], cwd=_SOURCES, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{library} does not compile:\n{done.stderr}")


def _fingerprint() -> str:
    digest = hashlib.sha256(" ".join((os.environ.get("CXX", "g++"), *_FLAGS, _UNUSED)).encode())
    for source in sorted(_SOURCES.glob("*.[ch]pp")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]
