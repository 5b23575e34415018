"""Find the GPUs of this host, and those that this process may use, without loading a driver's library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that select GPUs by number or UUID. HIP reads both. Their numbers count the GPUs that ROCR_VISIBLE_DEVICES
leaves."""


def visible_gpus(root: Path = Path("/")) -> int:
    """Return the number of GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, else all of the host.

    ``root`` is the directory that holds ``dev`` and ``sys``.
    """
    present = host_gpus(root)
    named = visible_lists(os.environ).values()
    return min(map(len, named)) if present and named else present


def host_gpus(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA's device files, or, where there are none, of AMD's GPUs that can be opened."""
    nvidia = sum(1 for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    # The file of a GPU that a container may not use cannot be read; the file of a CPU holds 0.
    return nvidia or sum(1 for path in root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id") if _read(path) > "0")


def visible_lists(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the GPUs that each variable of ``VISIBLE_DEVICES`` in ``environment`` names, up to the first ``-1``."""
    entries = {name: map(str.strip, environment[name].split(",")) for name in VISIBLE_DEVICES if name in environment}
    # CUDA ignores what follows the first invalid entry.
    return {name: list(takewhile(lambda gpu: gpu not in ("", "-1"), gpus)) for name, gpus in entries.items()}


def numa_node(gpu: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of an NVIDIA GPU, given as in CUDA_VISIBLE_DEVICES; None where it is unknown.

    Numbers follow the order of PCI addresses, which is also CUDA's order where all GPUs of a host are of one model.
    """
    address = _pci_address(gpu, root)
    node = _read(root / f"sys/bus/pci/devices/{address}/numa_node") if address else ""
    return int(node) if node.isdigit() else None


def _pci_address(gpu: str, root: Path) -> str | None:
    directories = sorted(root.glob("proc/driver/nvidia/gpus/*"))
    if gpu.isdigit():
        return directories[int(gpu)].name.lower() if int(gpu) < len(directories) else None
    # A UUID may be shortened; that of a MIG device is not listed.
    pattern = re.compile(rf"^GPU UUID:\s*{re.escape(gpu)}", re.MULTILINE)
    return next((path.name.lower() for path in directories if pattern.search(_read(path / "information"))), None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
