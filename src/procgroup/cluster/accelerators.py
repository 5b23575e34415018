"""The GPUs of this host and which of them this process may use, found without loading a driver's library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that name GPUs by number or UUID. HIP reads both. ROCR_VISIBLE_DEVICES is below them: they number the GPUs
that it leaves."""


def visible_gpus(root: Path = Path("/")) -> int:
    """Return the number of GPUs that this process may use: those named by CUDA_VISIBLE_DEVICES, else all of the host.

    ``root`` is the directory that holds ``dev`` and ``sys``.
    """
    present = host_gpus(root)
    named = visible_lists(os.environ).values()
    return min(map(len, named)) if present and named else present


def host_gpus(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA's device files, or, where there are none, of AMD's GPUs that can be opened."""
    nvidia = sum(1 for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    # A container cannot read the number of a GPU that it was not given; processors have the number 0.
    return nvidia or sum(1 for path in root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id") if _read(path) > "0")


def visible_lists(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the GPUs that each variable of ``VISIBLE_DEVICES`` in ``environment`` names, up to the first ``-1``."""
    return {name: _up_to_invalid(environment[name]) for name in VISIBLE_DEVICES if name in environment}


def numa_node(gpu: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node beside an NVIDIA GPU, given as in CUDA_VISIBLE_DEVICES; None where it is not known.

    Numbers follow the order of PCI addresses. That is CUDA's own order, too, where all GPUs of a host are alike.
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


def _up_to_invalid(text: str) -> list[str]:
    """Return the entries that count: CUDA ignores those from the first invalid one on."""
    entries = [entry.strip() for entry in text.split(",")]
    end = next((place for place, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
    return entries[:end]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
