"""env://: the rank, the world size and the store's address come from the environment.

That is how launchers tell a process its place. Rank 0 hosts the store at MASTER_ADDR:MASTER_PORT, unless
the launcher already does (PROCGROUP_STORE), or torchrun's agent has a store of its own there (agent_store).

srun, mpiexec and Kubernetes set other variables: where RANK, WORLD_SIZE or the address is not set, it comes from these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from procgroup.errors import IncompleteEnvironment
from procgroup.process import environ
from procgroup.rendezvous import hosting, urls
from procgroup.stores.store import Store
from procgroup.types import DEFAULT_TIMEOUT, Timeout

if TYPE_CHECKING:
    from procgroup.cluster.task_launcher import LauncherTask

_NEEDED: tuple[environ.Variable[Any], ...] = (
    environ.RANK,
    environ.WORLD_SIZE,
    environ.MASTER_ADDR,
    environ.MASTER_PORT,
)


# Without these, only env://'s own variables give the rank.
_TASK_NUMBERS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX")


def env_rendezvous(url: str, timeout: Timeout = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world size) from the environment; the URL's query wins over it.

    A world of 1 needs no address and touches no network. Raises IncompleteEnvironment, a ValueError, when
    variables are missing: it names them, the launcher that was detected, and what to write. Raises RendezvousConflict
    when RANK or WORLD_SIZE contradicts the launcher's numbers.
    """
    rank, world_size = urls.from_query(url)
    task = _task(is_placed=rank is not None and world_size is not None)
    rank = _first(rank, environ.RANK.get(), task and task.rank)
    world_size = _first(world_size, environ.WORLD_SIZE.get(), task and task.world_size)
    if rank is None or world_size is None:
        raise _missing(rank, world_size)
    urls.check(rank, world_size)
    if world_size == 1:
        from procgroup.stores.hash import HashStore

        yield HashStore(), rank, world_size
        return
    yield _open_store(task, rank, world_size, timeout), rank, world_size


def _first(*numbers: int | None) -> int | None:
    return next((number for number in numbers if number is not None), None)


def _task(*, is_placed: bool) -> LauncherTask | None:
    """Return this process as a launcher's task, whose numbers agree with the environment's; None where it is none.

    A launcher of torch.distributed's variables, which a task has started, is nearer than the task's own.
    """
    if environ.TORCHELASTIC_RUN_ID.is_set() or not any(os.environ.get(name) for name in _TASK_NUMBERS):
        return None
    # Not for every start of a group: importing them would make it slower.
    from procgroup.cluster import task_launcher
    from procgroup.rendezvous import launched

    task = task_launcher.detect()
    if task is not None and task.launcher.rank and not is_placed:
        launched.check_agreement(task)
    return task


def _open_store(task: LauncherTask | None, rank: int, world_size: int, timeout: Timeout) -> Store:
    host, port = environ.MASTER_ADDR.get(), environ.MASTER_PORT.get()
    if task is not None and (not host or port is None):
        return _store_of_tasks(task, host, port, rank, world_size, timeout)
    if not host or port is None:
        raise _missing(rank, world_size)
    if environ.TORCHELASTIC_USE_AGENT_STORE.get() and hosting.launcher_store_address(host, port) is None:
        from procgroup.rendezvous import agent_store

        return agent_store.open_store(host, port, rank=rank, world_size=world_size, timeout=timeout)
    return hosting.open_store(host, port, rank=rank, timeout=timeout)


def _store_of_tasks(
    task: LauncherTask, host: str, port: int | None, rank: int, world_size: int, timeout: Timeout
) -> Store:
    """Return the store of the launcher's tasks; MASTER_ADDR or MASTER_PORT, where one of them is set, wins."""
    from procgroup.rendezvous import launched

    if task.rank != rank or task.world_size not in (None, world_size):
        raise _missing(rank, world_size)
    if not host and port is None:
        store = launched.open_store(task, rank=rank, timeout=timeout)
    else:
        found = launched.meeting_point(task)
        store = found and hosting.open_store(host or found.host, port or found.port, rank=rank, timeout=timeout)
    if store is None:
        raise _missing(rank, world_size)
    return store


def _missing(rank: int | None, world_size: int | None) -> IncompleteEnvironment:
    # Needed for the error only, and importing them would make every start of a group slower.
    from procgroup.cluster import task_launcher
    from procgroup.rendezvous import start_advice

    found = {variable.name: os.environ[variable.name] for variable in _NEEDED if variable.is_set()}
    for variable, known in ((environ.RANK, rank), (environ.WORLD_SIZE, world_size)):
        if known is not None and variable.name not in found:
            found[variable.name] = str(known)
    task = task_launcher.detect()
    return IncompleteEnvironment(
        missing=[variable.name for variable in _NEEDED if variable.name not in found],
        found=found,
        launcher=task.launcher.name if task is not None else "",
        advice=start_advice.advice(task, found),
    )
