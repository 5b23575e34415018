"""The environment: the launcher of this process, unusable values, and variables that contradict each other."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from procgroup.cluster import task_launcher
from procgroup.diagnostics.doctor.findings import Finding, note, ok, problem, warning
from procgroup.process import environ
from procgroup.process.environ import Variable

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LEFT_OVER = "Start the program with its launcher, or unset the variable if another job has left it in this shell"


class VariablePlace(NamedTuple):
    """This process's rank and the number of ranks, as the environment gives them; None where it does not."""

    rank: int | None
    world_size: int | None


def place(environment: Mapping[str, str] = os.environ) -> VariablePlace:
    """Return this process's place, by RANK and WORLD_SIZE or by the variables of srun, mpiexec or Kubernetes."""
    task = task_launcher.detect(environment)
    try:
        found = VariablePlace(task.rank, task.world_size) if task else VariablePlace(None, None)
    except ValueError:
        found = VariablePlace(None, None)
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    return VariablePlace(found.rank if rank is None else rank, found.world_size if world_size is None else world_size)


def is_first_on_host(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the first of its job on this host, as far as its launcher says."""
    task = task_launcher.detect(environment)
    try:
        of_task = task.local_rank if task else None
    except ValueError:
        of_task = None
    local_rank = _number(environment, "LOCAL_RANK")
    return (of_task if local_rank is None else local_rank) in (None, 0)


def check(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield findings about the launcher and the variables."""
    yield _launcher(environment)
    yield from _unusable(environment)
    contradictions = [*_ranks(environment), *_meeting_point(environment), *_left_over(environment)]
    yield from contradictions
    yield from _transport(environment)
    if not contradictions:
        given = [
            f"{name}={environment[name]}" for name in (*_PLACE, "MASTER_ADDR", "MASTER_PORT") if name in environment
        ]
        yield ok(f"no contradictions in {', '.join(given)}" if given else "no variables of a job are set")


def _launcher(environment: Mapping[str, str]) -> Finding:
    if environment.get("TORCHELASTIC_RUN_ID"):
        name = "procgroup run" if environment.get("PROCGROUP_STORE") else "torchrun, or a launcher like it"
        return ok(f"started by {name}")
    task = task_launcher.detect(environment)
    if task is not None:
        return ok(f"started by {task.launcher.name}: {task.described()}")
    if environment.get("RANK"):
        return ok("started by hand: RANK is set, and no launcher was recognised")
    return note("started without a launcher")


def _unusable(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the variables of procgroup's own whose values it would refuse."""
    for variable in vars(environ).values():
        if isinstance(variable, Variable) and (text := environment.get(variable.name)):
            try:
                variable.parse(text)
            except ValueError as error:
                shown = "" if variable.is_secret else f"={text!r}"
                yield problem(f"{variable.name}{shown} is not usable: {error}", f"Correct or unset {variable.name}")


def _ranks(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield contradictions between ranks and numbers of ranks."""
    found = place(environment)
    for name, value, other in (("RANK", found.rank, "WORLD_SIZE"), ("WORLD_SIZE", found.world_size, "RANK")):
        if environment.get(name) and value is not None and None in found:
            yield problem(f"{name}={value} is set without {other}: init_process_group() fails", _LEFT_OVER)
    for name, size_name in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        rank, size = _number(environment, name), _number(environment, size_name)
        if rank is not None and size is not None and not 0 <= rank < size:
            yield problem(f"{name}={rank} is not below {size_name}={size}", f"Ranks are 0 to {size_name} - 1")
    local, size = _number(environment, "LOCAL_WORLD_SIZE"), _number(environment, "WORLD_SIZE")
    if local is not None and size is not None and local > size:
        yield problem(f"LOCAL_WORLD_SIZE={local} is more than WORLD_SIZE={size}", _LEFT_OVER)
    yield from _task(environment)


def _task(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield contradictions between RANK or WORLD_SIZE and the numbers of srun, mpiexec or Kubernetes."""
    task = None if environment.get("TORCHELASTIC_RUN_ID") else task_launcher.detect(environment)
    if task is None:
        return
    try:
        numbers = {"RANK": task.rank, "WORLD_SIZE": task.world_size}
    except ValueError as error:
        yield problem(str(error), "Correct the variable, or start the program with its launcher")
        return
    for name, number in numbers.items():
        given = _number(environment, name)
        if given is not None and number is not None and given != number:
            yield problem(f"{name}={given}, but {task.launcher.name} says {number}", f"Unset {name}: it is not needed")


def _meeting_point(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is missing or wrong about MASTER_ADDR and MASTER_PORT."""
    _, world_size = place(environment)
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    has_launcher = task_launcher.detect(environment) is not None
    if environment.get("RANK") and (world_size or 1) > 1 and not (host and port) and not has_launcher:
        missing = [name for name, text in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not text]
        yield problem(
            f"WORLD_SIZE={world_size} without {' and '.join(missing)}: the ranks do not find each other",
            "Set both to an address of rank 0's host and a free port of it, equal on all ranks",
        )
    local = _number(environment, "LOCAL_WORLD_SIZE")
    if _is_loopback(host) and local is not None and world_size is not None and local < world_size:
        yield problem(
            f"MASTER_ADDR={host} is this host alone, but the job has {world_size} ranks, {local} of them on this host",
            "Set MASTER_ADDR to an address of rank 0's host that the other hosts reach",
        )


def _left_over(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield variables that a launcher sets for its ranks where this process is none of them."""
    if environment.get("RANK"):
        return
    for name in ("TORCHELASTIC_RUN_ID", "PROCGROUP_STORE", "LOCAL_RANK"):
        if environment.get(name):
            yield warning(f"{name} is set, as by a launcher, but RANK is not", _LEFT_OVER)


def _transport(environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get("PROCGROUP_TRANSPORT") == "tcp":
        yield warning("PROCGROUP_TRANSPORT=tcp: ranks of one host share no memory", "Unset PROCGROUP_TRANSPORT")
    if name := environment.get("PROCGROUP_HOST_ID"):
        yield warning(
            f"PROCGROUP_HOST_ID={name}: ranks share memory with ranks of the same value only",
            "Unset PROCGROUP_HOST_ID, which is for tests",
        )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; None where it is not set, or is not a number, which is reported elsewhere."""
    try:
        return int(environment.get(name, ""))
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
