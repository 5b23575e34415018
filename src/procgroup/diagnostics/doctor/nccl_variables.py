"""NCCL's variables in the environment: names of interfaces, and settings that slow it down or stop it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning

_SWITCHES = {
    "NCCL_P2P_DISABLE": "the GPUs of a host do not read each other's memory",
    "NCCL_SHM_DISABLE": "the ranks of a host move arrays by the network",
}
_DEFAULT_EXCLUDES = ("lo", "docker")


def check(
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


def _counted(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"
