"""GPUs, their driver, and NCCL, which moves arrays between them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from procgroup.cluster.accelerators import host_gpus, visible_lists
from procgroup.diagnostics.doctor import driver, nccl_variables, shared_libraries
from procgroup.diagnostics.doctor.driver import Driver
from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning
from procgroup.diagnostics.doctor.system_files import read_text

_INSTALL = "pip install nvidia-nccl-cu13, or nvidia-nccl-cu12 for drivers of CUDA 12"
_MOST_PAIRS = 4


def check(
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    version_of_library: Callable[[str, Path], str] = shared_libraries.version,
    describe: Callable[[], Driver] = driver.describe,
) -> Iterator[Finding]:
    """Yield findings about GPUs and NCCL. Where there are no GPUs, these are notes."""
    count = host_gpus(root)
    is_nvidia = any((root / "dev").glob("nvidia[0-9]*"))
    described = describe() if driver.is_here(environment, root) else None
    usable = described.gpus if described is not None else ()
    if count:
        yield ok(f"{_counted(count)}{_models(root)}")
        yield from _visible(environment, count)
    elif not usable:
        yield note("no GPU is visible to this process")
    if is_nvidia:
        yield from _driver(environment, root)
    if described is not None and (is_nvidia or usable):
        yield from _described(described, environment)
    preloaded = shared_libraries.loaded("libnccl.so", root / "proc/self/maps")
    libraries = preloaded or shared_libraries.find(["libnccl.so*"], environment, root)
    for file in libraries:
        yield (ok if is_nvidia or usable else note)(f"NCCL {version_of_library('nccl', file)} at {file}")
    if (is_nvidia or usable) and not libraries:
        yield warning("libnccl.so.2 not found: arrays on GPUs go through host memory", f"Install NCCL: {_INSTALL}")
    if usable:
        yield from nccl_variables.check(len(usable), environment, root)


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


def _described(described: Driver, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what the driver says of the GPUs of this process."""
    if described.error:
        yield problem(
            f"the GPUs cannot be used: {described.error}",
            "See whether nvidia-smi works here; in a container start with docker run --gpus all",
        )
        return
    gpus = described.gpus
    names = Counter(gpu.name for gpu in gpus)
    listed = ", ".join(f"{number} x {name}" for name, number in names.items())
    yield ok(f"CUDA {described.cuda}: this process may use {_counted(len(gpus))}{f', {listed}' if listed else ''}")
    ungated = [str(number) for number, gpu in enumerate(gpus) if not gpu.has_gate]
    if ungated:
        yield note(
            f"no stream memory operations on GPU {', '.join(ungated)}: the ranks agree on a call before NCCL gets it"
        )
    elif gpus and environment.get("PROCGROUP_NCCL_GATE") == "0":
        yield note("PROCGROUP_NCCL_GATE=0: the ranks agree on a call before NCCL gets it")
    elif gpus:
        yield ok("stream memory operations work: calls are queued at once, behind gates")
    apart = [(one, other) for one in range(len(gpus)) for other in range(one) if other not in gpus[one].reaches]
    if apart:
        pairs = ", ".join(f"{other} and {one}" for one, other in apart[:_MOST_PAIRS])
        more = f" and {len(apart) - _MOST_PAIRS} more pairs" if len(apart) > _MOST_PAIRS else ""
        yield note(f"these GPUs do not reach each other's memory, and NCCL goes through the host: {pairs}{more}")
    elif len(gpus) > 1:
        yield ok("all of them reach each other's memory")
