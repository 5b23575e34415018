"""All checks of one host, in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from procgroup.diagnostics.doctor import gpus, limits, memory, network, software, variables
from procgroup.diagnostics.doctor.findings import Finding, Section, warning

Checks = Mapping[str, Callable[[], Iterable[Finding]]]


def checks(*, tries_port: bool = True) -> Checks:
    """Return the checks of this host by the names of their sections. See ``network.check`` for ``tries_port``."""
    return {
        "Software": software.check,
        "Processors": limits.check_processors,
        "Memory": memory.check,
        "Limits": lambda: limits.check(variables.place().world_size or 1),
        "Network": lambda: network.check(tries_port=tries_port),
        "Environment": variables.check,
        "GPUs and NCCL": gpus.check,
        "MPI": software.check_mpi,
    }


def sections(chosen: Checks) -> list[Section]:
    """Run the checks. One that fails itself becomes a finding, so that the others are still made."""
    return [Section(name, _run(name, check)) for name, check in chosen.items()]


def _run(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:
        found.append(
            warning(
                f"the check itself failed: {type(error).__name__}: {error}",
                f"Please report it, with this line and the kind of system, as a fault of procgroup doctor ({name})",
            )
        )
    return found
