"""GPUs, their driver, and NCCL, which moves arrays between them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from procgroup.cluster.accelerators import host_gpus, visible_lists
from procgroup.diagnostics.doctor import shared_libraries
from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning
from procgroup.diagnostics.doctor.system_files import read_text

_INSTALL = "pip install 'procgroup[nccl-cu13]', or nccl-cu12 for drivers of CUDA 12"


def check(
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    version_of_library: Callable[[str, Path], str] = shared_libraries.version,
) -> Iterator[Finding]:
    """Yield findings about GPUs and NCCL. Where there are none, these are notes."""
    count = host_gpus(root)
    is_nvidia = any((root / "dev").glob("nvidia[0-9]*"))
    if count == 0:
        yield note("no GPU is visible to this process")
    else:
        yield ok(f"{_counted(count)}{_models(root)}")
        yield from _visible(environment, count)
    if is_nvidia:
        yield from _driver(environment, root)
    libraries = shared_libraries.find(["libnccl.so*"], environment, root)
    for file in libraries:
        yield (ok if is_nvidia else note)(f"NCCL {version_of_library('nccl', file)} at {file}")
    yield from _nccl(is_nvidia, bool(libraries))


def _counted(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _models(root: Path) -> str:
    files = (root / "proc/driver/nvidia/gpus").glob("*/information")
    models = Counter(found[1] for file in files if (found := re.search(r"Model:\s*(.+)", read_text(file))))
    return f": {', '.join(f'{number} x {model}' for model, number in models.items())}" if models else ""


def _visible(environment: Mapping[str, str], count: int) -> Iterator[Finding]:
    """Yield the GPUs that CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES names and this host does not have."""
    for name, listed in visible_lists(environment).items():
        missing = [gpu for gpu in listed if gpu.isdigit() and int(gpu) >= count]
        if missing:
            yield warning(
                f"{name}={environment[name]} names GPU {', '.join(missing)}, but there are {count}",
                f"Correct or unset {name}: GPUs after a missing one are not used",
            )
        else:
            yield ok(f"{name}={environment[name]}: this process uses {len(listed)} of them")


def _driver(environment: Mapping[str, str], root: Path) -> Iterator[Finding]:
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", read_text(root / "proc/driver/nvidia/version"))
    libraries = shared_libraries.find(["libcuda.so.1"], environment, root)
    if not libraries:
        yield problem(
            "there are GPUs, but libcuda.so.1, a part of their driver, is not found",
            "Install the driver; in a container start with docker run --gpus all, and "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    yield ok(f"driver {found[1]}") if found else note("the version of the driver is unknown")


def _nccl(has_gpus: bool, has_library: bool) -> Iterator[Finding]:
    if has_gpus and not has_library:
        yield warning("libnccl.so.2 not found: arrays on GPUs go through host memory", f"Install NCCL: {_INSTALL}")
    elif not has_library:
        yield note("NCCL is not installed")
