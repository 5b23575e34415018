"""GPUs, their driver, and NCCL, which moves arrays between them."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from procgroup.cluster.accelerators import host_gpus, visible_lists
from procgroup.diagnostics.doctor import shared_libraries
from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning
from procgroup.diagnostics.doctor.shared_libraries import GpuDriver
from procgroup.diagnostics.doctor.system_files import read_text

_INSTALL = "pip install nvidia-nccl-cu13, or nvidia-nccl-cu12 for drivers of CUDA 12"
_MOST_PAIRS = 4


_SWITCHES = {
    "NCCL_P2P_DISABLE": "the GPUs of a host do not read each other's memory",
    "NCCL_SHM_DISABLE": "the ranks of a host move arrays by the network",
}
_DEFAULT_EXCLUDES = ("lo", "docker")


def check(
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    version_of_library: Callable[[str, Path], str] = shared_libraries.version,
    describe: Callable[[], GpuDriver] = shared_libraries.describe,
) -> Iterator[Finding]:
    """Yield findings about GPUs and NCCL. Where there are no GPUs, these are notes."""
    count = host_gpus(root)
    is_nvidia = any((root / "dev").glob("nvidia[0-9]*"))
    described = describe() if shared_libraries.is_here(environment, root) else None
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
        yield from check_variables(len(usable), environment, root)


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


def _described(described: GpuDriver, environment: Mapping[str, str]) -> Iterator[Finding]:
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


def check_variables(
    gpus: int,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    interfaces: Sequence[str] | None = None,
) -> Iterator[Finding]:
    """Yield findings for a process that may use so many GPUs. ``interfaces`` are the names of this host's."""
    yield from _ranks_and_gpus(gpus, environment)
    yield from _interface(environment, interfaces or [name for _, name in socket.if_nameindex()])
    for name, effect in _SWITCHES.items():
        if _is_on(environment, name):
            yield warning(f"{name}={environment[name]}: {effect}", f"Unset {name}, unless it works around a fault")
    cards = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    if _is_on(environment, "NCCL_IB_DISABLE") and cards:
        yield warning(
            f"NCCL_IB_DISABLE={environment['NCCL_IB_DISABLE']}: hosts move arrays by TCP, though there is {cards[0]}",
            "Unset NCCL_IB_DISABLE, unless it works around a fault",
        )


def _ranks_and_gpus(gpus: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a warning where this host has more ranks than the process may use GPUs."""
    local = environment.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local) if local.isdigit() else 1
    if ranks <= gpus:
        return
    if _is_on(environment, "NCCL_MULTI_RANK_GPU_ENABLE"):
        yield note(f"{ranks} ranks of this host share {_counted(gpus)}, which takes NCCL 2.30 or later")
    elif gpus == 1 and "CUDA_VISIBLE_DEVICES" in environment:
        yield note(
            f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']} leaves 1 GPU to this process: each of the "
            f"{ranks} ranks of this host needs another one"
        )
    else:
        yield warning(
            f"this host has {ranks} ranks, and this process may use {_counted(gpus)}",
            f"Start {gpus} ranks on it, as --nproc-per-node=gpu does, or let CUDA_VISIBLE_DEVICES name more GPUs; "
            "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share one, from NCCL 2.30 on",
        )


def _interface(environment: Mapping[str, str], interfaces: Sequence[str]) -> Iterator[Finding]:
    """Yield by which interface NCCL connects hosts: NCCL_SOCKET_IFNAME has prefixes, ``=`` names and ``^`` excludes."""
    text = environment.get("NCCL_SOCKET_IFNAME", "")
    usual = [name for name in interfaces if not name.startswith(_DEFAULT_EXCLUDES)]
    if not text:
        if len(usual) > 1:
            yield note(f"NCCL chooses one of {', '.join(usual)} between hosts; NCCL_SOCKET_IFNAME names it")
        elif usual:
            yield ok(f"NCCL uses {usual[0]} between hosts")
        return
    excludes = text.startswith("^")
    is_exact = text.lstrip("^").startswith("=")
    wanted = [name.strip() for name in text.lstrip("^=").split(",")]
    named = [one for one in interfaces if any(one == name if is_exact else one.startswith(name) for name in wanted)]
    chosen = [one for one in interfaces if one not in named] if excludes else named
    if chosen:
        yield ok(f"NCCL_SOCKET_IFNAME={text}: NCCL uses {', '.join(chosen)}")
    else:
        yield problem(
            f"NCCL_SOCKET_IFNAME={text} leaves no interface of this host, which has {', '.join(interfaces)}",
            "Correct NCCL_SOCKET_IFNAME, or unset it",
        )


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0") not in ("", "0")
