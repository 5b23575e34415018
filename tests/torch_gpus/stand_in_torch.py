"""The device "cuda" for a PyTorch without CUDA, so that its GPU programs run on the stand-in GPUs of nccl/stand_ins.py.

The ranks of a world have it with ``torch="gpus"``, and call `start` first::

    def program(rank, size):
        stand_in_torch.start()
        torch.cuda.set_device(rank)
        tensor = torch.ones(3, device="cuda")

    run(program, 2, torch="gpus", environment={"PROCGROUP_STAND_IN_GPUS": "2"})

A program that a test starts finds it by its environment::

    run_command([sys.executable, "program.py"], environment=stand_in_torch.environment(gpus=2))

Tensors, streams, events and devices are those of torch's own registries (torch_device.cpp); of torch.cuda there is here
what programs of several processes use, and graphs (torch_graphs.hpp). There are no pools of memory that graphs share,
and random numbers are those of the CPU's generator.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from nccl import stand_ins

_HERE = Path(__file__).resolve().parent
_BUILDS = _HERE.parents[1] / "build" / "stand-ins"
_SOURCE = _HERE / "torch_device.cpp"
_HEADERS = (_HERE / "torch_driver.hpp", _HERE / "torch_graphs.hpp")
_LIBRARY = "libtorch_device.so"
_FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wno-deprecated")


def build() -> Path:
    """Return the library; compile it where its source, torch, or the stand-ins of the driver have changed."""
    driver, torch_folder = stand_ins.build(), _torch_folder()
    torch_version = (torch_folder / "version.py").read_bytes()
    places = " ".join(map(str, (torch_folder, driver, *_FLAGS)))
    sources = b"".join(path.read_bytes() for path in (_SOURCE, *_HEADERS))
    facts = sources + torch_version + places.encode()
    folder = _BUILDS / f"torch-{hashlib.sha256(facts).hexdigest()[:16]}"
    with (_BUILDS / "torch-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that test at the same time compile once
        if not folder.is_dir():
            _build_in(folder, driver, torch_folder)
    return folder / _LIBRARY


def environment(gpus: int = 1) -> dict[str, str]:
    """Return the variables with which a new Python process has the device as soon as it imports torch."""
    build()
    path = os.pathsep.join([str(_HERE / "site"), str(_HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**stand_ins.environment(gpus), "PYTHONPATH": path, "PROCGROUP_STAND_IN_TORCH": "1"}


def start() -> None:
    """Load the stand-ins of the driver, NCCL and torch's CUDA into this process, which has not imported torch before.

    Idempotent.
    """
    if _is_started():
        return
    _load()
    from torch_gpus import stand_in_cuda

    stand_in_cuda.install()


def start_with_torch() -> None:
    """Do so when this process imports torch."""
    sys.meta_path.insert(0, _Finder())


def _is_started() -> bool:
    return hasattr(sys.modules.get("torch"), "is_on_stand_in_gpus")


def _load() -> None:
    assert "torch" not in sys.modules, "torch keeps whether there is a device from its import on"
    stand_ins.load()
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as Python does, also for who only asks where it is; what comes to import it loads the stand-ins."""

    _before: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is not None:
            self._before, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._before.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        del sys.modules["torch"]
        _load()
        sys.modules["torch"] = module
        self._before.exec_module(module)
        from torch_gpus import stand_in_cuda

        stand_in_cuda.install()


def _torch_folder() -> Path:
    found = importlib.machinery.PathFinder.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _build_in(folder: Path, driver: Path, torch_folder: Path) -> None:
    unfinished = Path(tempfile.mkdtemp(dir=_BUILDS))
    headers, libraries = torch_folder / "include", torch_folder / "lib"
    command = [os.environ.get("CXX", "g++"), *_FLAGS, f"-I{headers}", f"-I{headers}/torch/csrc/api/include"]
    command += ["-o", str(unfinished / _LIBRARY), str(_SOURCE), f"-L{libraries}", "-lc10", "-ltorch_cpu"]
    command += [str(driver / "libcuda.so.1"), f"-Wl,-rpath,{libraries},-rpath,{driver}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{_SOURCE.name} does not compile:\n{done.stderr}")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
